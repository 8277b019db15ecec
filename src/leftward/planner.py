"""The planner: what an architecture costs before it exists – parameters, FLOPs, memory, KV cache, time.

Arithmetic on a Config: no torch, no weights, nothing measured. Counts are exact integers. What a formula leaves out is
said where it stands; docs/planning.md derives them. Names and directories are resolved in planning.py; what loss to
expect is scaling_laws.py's business.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from leftward.config import Config
from leftward.errors import UserError, nearest
from leftward.scaling_laws import (
    CHINCHILLA_FITS,
    ComputeOptimal,
    compute_optimal,
    kaplan_loss_of_parameters,
    kaplan_loss_of_tokens,
)

LOGITS_AT_ONCE = 1 << 26
"""At most so many exist in training: the loss is taken for some rows after others (training/loss.py)."""


def head_portions(rows: int, padded_vocab_size: int) -> int:
    """How many portions of so many rows that are."""
    return -(-rows * padded_vocab_size // LOGITS_AT_ONCE)


_MOST = 1e30  # of any number that is given: beyond it floats end, and nothing is
OptimizerName = Literal["muon", "adamw"]


class _Storage(NamedTuple):
    """`bytes` hold `numbers` numbers: GGUF's types keep blocks of them with their scales."""

    bytes: int
    numbers: int = 1

    def size(self, count: int) -> int:
        return -(-count * self.bytes // self.numbers)


DTYPES = {
    "fp32": _Storage(4),
    "bf16": _Storage(2),
    "fp16": _Storage(2),
    "fp8": _Storage(1),
    "int8": _Storage(1),
    "q8_0": _Storage(34, 32),
    "q6_k": _Storage(210, 256),
    "q5_k": _Storage(176, 256),
    "q4_k": _Storage(144, 256),
    "q4_1": _Storage(20, 32),
    "q4_0": _Storage(18, 32),
}
_COMPUTED_IN = ("fp32", "bf16", "fp16")
_TRAINED_IN = ("fp32", "bf16")


@dataclass(frozen=True)
class Device:
    """Figures from a vendor's data sheet: dense bf16 products with fp32 sums, without sparsity."""

    peak_flops: float
    """FLOP/s"""
    bandwidth: float
    """Bytes/s of its memory."""
    memory: float
    """Bytes"""
    source: str


DEVICES = {
    "a100-40gb": Device(312e12, 1.555e12, 40e9, "NVIDIA A100 data sheet (SXM)"),
    "a100-80gb": Device(312e12, 2.039e12, 80e9, "NVIDIA A100 data sheet (SXM)"),
    "h100-pcie": Device(756e12, 2.0e12, 80e9, "NVIDIA H100 data sheet, half of the figure with sparsity"),
    "h100-sxm": Device(989e12, 3.35e12, 80e9, "NVIDIA H100 data sheet, half of the figure with sparsity"),
    "h200": Device(989e12, 4.8e12, 141e9, "NVIDIA H200 data sheet, half of the figure with sparsity"),
    "l4": Device(121e12, 300e9, 24e9, "NVIDIA L4 data sheet, half of the figure with sparsity"),
    "l40s": Device(362e12, 864e9, 48e9, "NVIDIA L40S data sheet"),
    "mi300x": Device(1307e12, 5.3e12, 192e9, "AMD Instinct MI300X data sheet"),
    "rtx-3090": Device(71e12, 936e9, 24e9, "NVIDIA Ampere GA102 whitepaper"),
    "rtx-4090": Device(165.2e12, 1.008e12, 24e9, "NVIDIA Ada GPU architecture whitepaper"),
}


# ---- parameters


@dataclass(frozen=True)
class Parameters:
    """Every weight once: a tied head is the embedding."""

    token_embedding: int
    position_embedding: int
    attention: int
    feed_forward: int
    router: int
    norms: int
    """Those of queries and keys among them."""
    head: int
    total: int
    active: int
    """Those that take part in one token's computation: of the experts, those that it is sent to."""
    non_embedding: int
    """Without the tables and the head."""


def count_parameters(config: Config) -> Parameters:
    """The weights of `config`'s Decoder."""
    d, layers = config.d_model, config.n_layers
    norm = (d if config.norm_weight != "none" else 0) + (d if config.norm_bias else 0)
    block_norms, outer_norms = _norm_counts(config)
    expert = _feed_forward_weights(config, config.d_ff) + _feed_forward_biases(config, config.d_ff)
    shared = _feed_forward_weights(config, config.d_shared) + _feed_forward_biases(config, config.d_shared)
    attention = _attention_weights(config) + _attention_vectors(config)
    rows = config.max_seq_len + config.position_offset
    parts = {
        "token_embedding": config.padded_vocab_size * d,
        "position_embedding": rows * d if config.positions == "learned" else 0,
        "attention": layers * attention,
        "feed_forward": layers * (max(config.n_experts, 1) * expert + (shared if config.d_shared else 0)),
        "router": layers * config.n_experts * (d + config.ff_bias),
        "norms": layers * (block_norms * norm + _qk_norm_weights(config)) + outer_norms * norm,
        "head": config.padded_vocab_size * ((0 if config.tie_embeddings else d) + config.head_bias),
    }
    total = sum(parts.values())
    idle = max(0, config.n_experts - config.n_experts_per_token)
    outside = parts["token_embedding"] + parts["position_embedding"] + parts["head"]
    return Parameters(**parts, total=total, active=total - layers * idle * expert, non_embedding=total - outside)


def _norm_counts(config: Config) -> tuple[int, int]:
    """Norms of the residual stream, in a block and outside of the blocks."""
    return {"sandwich": 4, "parallel_shared": 1}.get(config.block, 2), (config.block != "post") + config.embed_norm


def _attention_weights(config: Config) -> int:
    """Of a layer's q, k, v and output matrices."""
    heads = 2 * config.n_heads + 2 * config.n_kv_heads
    return heads * config.head_dim * config.d_model


def _attention_vectors(config: Config) -> int:
    qkv = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    biases = (qkv if config.qkv_bias else 0) + (config.d_model if config.attn_out_bias else 0)
    return biases + (config.n_heads if config.attn_sinks else 0)


def _qk_norm_weights(config: Config) -> int:
    if config.qk_norm == "none" or config.norm_weight == "none":
        return 0
    return config.head_dim * (2 if config.qk_norm == "per_head" else config.n_heads + config.n_kv_heads)


def _feed_forward_weights(config: Config, width: int) -> int:
    """Of the two or three matrices of a feed-forward of this hidden width."""
    return (3 if config.is_gated else 2) * config.d_model * width


def _feed_forward_biases(config: Config, width: int) -> int:
    return (2 if config.is_gated else 1) * width + config.d_model if config.ff_bias else 0


def _matrix_weights(config: Config) -> int:
    """The weights of the blocks' matrices, which Muon moves."""
    feed_forward = max(config.n_experts, 1) * _feed_forward_weights(config, config.d_ff)
    shared, router = _feed_forward_weights(config, config.d_shared), config.n_experts * config.d_model
    return config.n_layers * (_attention_weights(config) + feed_forward + shared + router)


# ---- FLOPs


@dataclass(frozen=True)
class Flops:
    """The products of matrices in a forward pass over one sequence; a multiply-add is 2.

    Not counted: tables, norms, activations, rotations, biases, softmax. full: every query is multiplied with every key
    (in local layers, with as many as the window holds), which is the usual convention, and what MFU is given in.
    causal: only with those that it sees.
    """

    seq_len: int
    attention_projections: int
    attention_full: int
    attention_causal: int
    feed_forward: int
    router: int
    head: int
    forward_full: int
    forward_causal: int
    training_full: int
    """Three times the forward pass: the backward pass takes two products where that takes one."""
    training_causal: int
    forward_per_token: float
    """Full."""
    training_per_token: float


def count_flops(config: Config, seq_len: int) -> Flops:
    """Of one sequence of `seq_len` tokens."""
    tokens, layers, d = seq_len, config.n_layers, config.d_model
    experts = config.n_experts_per_token if config.n_experts else 1
    feed_forward = experts * _feed_forward_weights(config, config.d_ff) + _feed_forward_weights(config, config.d_shared)
    parts = {
        "attention_projections": 2 * tokens * layers * _attention_weights(config),
        "feed_forward": 2 * tokens * layers * feed_forward,
        "router": 2 * tokens * layers * config.n_experts * d,
        "head": 2 * tokens * d * config.padded_vocab_size,
    }
    # Scores and the weighted sum: two products of head_dim a pair, head and layer.
    a_pair = 4 * config.n_heads * config.head_dim
    full = a_pair * sum(n * _full_pairs(config, layer, seq_len) for layer, n in _kinds(config))
    causal = a_pair * sum(n * _visible_pairs(config, layer, seq_len) for layer, n in _kinds(config))
    products = sum(parts.values())
    return Flops(
        seq_len=seq_len,
        **parts,
        attention_full=full,
        attention_causal=causal,
        forward_full=products + full,
        forward_causal=products + causal,
        training_full=3 * (products + full),
        training_causal=3 * (products + causal),
        forward_per_token=(products + full) / tokens,
        training_per_token=3 * (products + full) / tokens,
    )


def _kinds(config: Config) -> list[tuple[int, int]]:
    """(layer, how many are like it) for each kind of layer that the patterns make."""
    period = math.lcm(len(config.attention_pattern), len(config.position_pattern))
    return [(layer, len(range(layer, config.n_layers, period))) for layer in range(min(period, config.n_layers))]


def _window(config: Config, layer: int, seq_len: int) -> int:
    """How many keys a query of this layer sees at most of the past, its own among them."""
    if config.window is None or not config.is_local(layer):
        return seq_len
    return min(config.window, seq_len)


def _full_pairs(config: Config, layer: int, seq_len: int) -> int:
    """As many for every query as one in the middle sees; all where the layer is global."""
    window = _window(config, layer, seq_len)
    return seq_len * (window if config.causal else min(seq_len, 2 * window - 1))


def _visible_pairs(config: Config, layer: int, seq_len: int) -> int:
    """Pairs of a query and a key that it sees: the sum of min(i + 1, window) over i < seq_len; without a causal mask,
    as many on the other side."""
    window = _window(config, layer, seq_len)
    past = window * (window + 1) // 2 + (seq_len - window) * window
    return past if config.causal else 2 * past - seq_len


# ---- memory


@dataclass(frozen=True)
class KVCacheSize:
    """Keys and values that a decoder keeps of the tokens behind it."""

    dtype: str
    bytes_per_token: int
    """In all layers; once a window is full, local layers no longer grow."""
    bytes_per_token_global: int
    """In the layers that see everything."""
    bytes: int
    """Of all rows at the given length: local layers hold min(length, window) tokens."""


def count_kv_cache(config: Config, seq_len: int, batch_size: int = 1, dtype: str = "bf16") -> KVCacheSize:
    """2 · n_kv_heads · head_dim numbers a token and layer; in int8 a scale of 4 bytes beside each head_dim of them."""
    scale = 4 if dtype == "int8" else 0
    a_layer = 2 * config.n_kv_heads * (DTYPES[dtype].size(config.head_dim) + scale)
    held = sum(n * _window(config, layer, seq_len) for layer, n in _kinds(config))
    n_global = sum(n for layer, n in _kinds(config) if not config.is_local(layer))
    return KVCacheSize(
        dtype=dtype,
        bytes_per_token=a_layer * config.n_layers,
        bytes_per_token_global=a_layer * n_global,
        bytes=a_layer * held * batch_size,
    )


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes at the peak of a step on one device, as `training/` keeps them.

    Not counted: temporaries inside an operation, what an allocator wastes, the CUDA context, dropout's masks.
    """

    dtype: str
    optimizer: str
    masters: int
    """fp32 weights."""
    copies: int
    """Rounded for computing in bf16."""
    gradients: int
    """Summed in fp32; in bf16 those of one backward pass stand beside the sum."""
    optimizer_state: int
    activations: int
    """What a forward pass keeps for the backward pass."""
    logits: int
    """Of the rows whose loss is taken at once: logits, their logarithm of softmax in fp32 and, in bf16, the fp32 copy
    between."""
    total: int


def count_training_memory(
    config: Config, seq_len: int, batch_size: int, dtype: str, optimizer: OptimizerName = "muon"
) -> TrainingMemory:
    """`batch_size` is that of a micro-batch: sequences in memory at a time."""
    parameters = count_parameters(config).total
    # AdamW keeps two averages of each weight, Muon one.
    averages = 2 * parameters - (_matrix_weights(config) if optimizer == "muon" else 0)
    rounded = dtype != "fp32"
    of_a_logit = DTYPES[dtype].bytes + 4 + (4 if rounded else 0)
    rows = batch_size * seq_len
    rows_at_once = -(-rows // head_portions(rows, config.padded_vocab_size))
    parts = {
        "masters": 4 * parameters,
        "copies": 2 * parameters if rounded else 0,
        "gradients": (6 if rounded else 4) * parameters,
        "optimizer_state": 4 * averages,
        "activations": count_activations(config, seq_len, batch_size, dtype),
        "logits": rows_at_once * config.padded_vocab_size * of_a_logit,
    }
    return TrainingMemory(dtype=dtype, optimizer=optimizer, **parts, total=sum(parts.values()))


# Numbers that a feed-forward keeps for each of its hidden units: what goes into its activation (gate and up count
# one each), the factors of products, and what goes into `down`. ReLU keeps its result alone.
_KEPT_A_HIDDEN_UNIT = {
    "swiglu": 4,
    "geglu": 4,
    "geglu_tanh": 4,
    "swiglu_clamped": 7,
    "gelu": 2,
    "gelu_tanh": 2,
    "relu": 1,
    "relu2": 2,
}


def count_activations(config: Config, seq_len: int, batch_size: int, dtype: str) -> int:
    """Bytes that our Decoder's forward pass keeps for the backward pass, but for the logits.

    Every product keeps its input, every norm its input or that divided by the RMS, attention q, k, v and its result.
    Where a kernel applies the mask by itself no scores are kept; `_kept_scores` has the other cases.
    """
    size, d = DTYPES[dtype].bytes, config.d_model
    norm = d * size + (8 if config.norm == "layernorm" else size)  # mean and 1 / σ in fp32; 1 / RMS
    block_norms, outer_norms = _norm_counts(config)
    inputs = (1 if config.block == "parallel_shared" else 2) * d * size
    if config.block == "parallel" and config.norm == "layernorm":  # both of whose norms keep the same x
        inputs -= d * size
    kept = _KEPT_A_HIDDEN_UNIT[config.feed_forward]
    if config.n_experts:  # each token is copied to its experts, and their results are kept for the weighted sum
        copies = config.n_experts_per_token * (2 * d + kept * config.d_ff) * size
        feed_forward = copies + kept * config.d_shared * size + 4 * config.n_experts + 32 * config.n_experts_per_token
    else:
        feed_forward = kept * config.d_ff * size
    a_token = config.n_layers * (block_norms * norm + inputs + feed_forward)
    a_token += outer_norms * norm + d * size  # the input of the head
    total = batch_size * seq_len * a_token
    return total + sum(n * _kept_by_attention(config, layer, seq_len, batch_size, size) for layer, n in _kinds(config))


def _kept_by_attention(config: Config, layer: int, seq_len: int, batch_size: int, size: int) -> int:
    """q, k and v as they come from one product (v is kept as a part of it), q and k after norm and rotation, the
    result, and the scores where they are kept."""
    heads, kv_heads = config.n_heads, config.n_kv_heads
    is_rotated = config.positions == "rotary" and config.knows_positions(layer)
    has_slopes = config.positions in ("alibi", "alibi_mpt") and config.knows_positions(layer)
    # What PyTorch's kernel lacks is written out, over keys and values repeated for each head; so it does itself with a
    # mask that has a gradient, as sinks have.
    is_written_out = config.attn_softcap is not None or config.attn_sinks or (has_slopes and size < 4)
    numbers = heads * config.head_dim  # the result
    if config.qk_norm != "none":
        numbers += (heads + kv_heads) * (config.head_dim + 1)
    if is_written_out:  # q, the keys and values of each block of queries, and its result where they are joined
        block = _query_block(config, layer, seq_len)
        copies = _masked_pairs(config, layer, seq_len) / (block * seq_len)
        padded = config.attn_sinks and config.attn_softcap is None  # by the sink's key, before they become fp32
        repeated = 2 * heads + (2 * kv_heads if padded and size < 4 else 0)
        numbers += round((heads * (1 + (block < seq_len)) + repeated * copies) * config.head_dim)
    else:
        if _window(config, layer, seq_len) < seq_len:  # worked in blocks of queries, whose results are kept, and joined
            numbers += heads * config.head_dim
        numbers += (heads + 2 * kv_heads) * config.head_dim
        if is_rotated or config.qk_norm != "none":
            numbers += (heads + kv_heads) * config.head_dim
    of_tokens = batch_size * seq_len * (numbers * size + 4 * heads)
    return of_tokens + _kept_scores(config, layer, seq_len, batch_size, size, has_slopes, is_written_out)


def _query_block(config: Config, layer: int, seq_len: int) -> int:
    """How many queries are worked on together, where the mask is a tensor (model/attention.py)."""
    window = _window(config, layer, seq_len)
    return seq_len if seq_len <= 512 else min(seq_len, max(256, window if window < seq_len else 0))


def _masked_pairs(config: Config, layer: int, seq_len: int) -> int:
    """Queries times the keys that their block can reach."""
    window, block = _window(config, layer, seq_len), _query_block(config, layer, seq_len)
    if window < seq_len:
        return seq_len * min(seq_len, window + max(256, window))
    return seq_len * (seq_len + block) // 2 if config.causal else seq_len**2


def _kept_scores(
    config: Config, layer: int, seq_len: int, batch_size: int, size: int, has_slopes: bool, is_written_out: bool
) -> int:
    """At most, of attention that can't do without a mask or scores as tensors, worked in blocks of queries."""
    window, pairs = _window(config, layer, seq_len), _masked_pairs(config, layer, seq_len)
    if is_written_out and config.attn_softcap is None and not has_slopes:
        return batch_size * config.n_heads * pairs * 4
    if is_written_out:
        softcapped = 4 if config.attn_softcap is not None else 0
        rounded = size if size < 4 else 0
        return batch_size * config.n_heads * pairs * (4 + softcapped + rounded)
    if has_slopes:
        return 4 * config.n_heads * pairs
    return size * pairs if window < seq_len else 0


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes, but for a pass's own activations."""

    weights: int
    kv_cache: int
    total: int


# ---- time


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What is computed on."""

    device: str | None = None
    """A name in DEVICES, for the figures that are not given."""
    peak_flops: float | None = None
    """FLOP/s of one device in the dtype of the plan."""
    bandwidth: float | None = None
    """Bytes/s of one device's memory."""
    memory: float | None = None
    """Bytes of one device."""
    n_devices: int = 1
    """That share the work evenly, and lose nothing between them."""
    mfu: float | None = None
    """Model FLOPs utilisation: the share of the peak that training is expected to reach."""
    tokens_per_second: float | None = None
    """A measured training speed of all devices, to get the MFU of."""

    def settled(self, dtype: str) -> Hardware:
        """With the device's figures. Its peak is that of 16-bit products, and stays unknown for another dtype."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not 1 / _MOST <= value <= _MOST:
                raise UserError(f"{field.name} is {_short(value)}: it must be between {1 / _MOST:g} and {_MOST:g}")
        if self.mfu is not None and self.mfu > 1:
            raise UserError(f"mfu is {self.mfu:g}: it is a share of the peak, at most 1")
        if self.mfu is not None and self.tokens_per_second is not None:
            raise UserError("mfu and tokens_per_second say the same: give one")
        if self.device is None:
            if not (self.peak_flops or self.bandwidth or self.memory):
                raise UserError("nothing is known of the hardware: give device, or peak_flops, bandwidth or memory")
            return self
        if self.device not in DEVICES:
            raise UserError(f"device is {self.device!r}: {nearest(self.device, DEVICES)}")
        known = DEVICES[self.device]
        peak = known.peak_flops if dtype in ("bf16", "fp16") else None
        return dataclasses.replace(
            self,
            peak_flops=self.peak_flops or peak,
            bandwidth=self.bandwidth or known.bandwidth,
            memory=self.memory or known.memory,
        )


@dataclass(frozen=True)
class Limits:
    """What the hardware allows at best. Reality is below. None: a figure that this needs is not known."""

    hardware: Hardware
    decode_bytes: int
    """That each decoding step reads: the weights that take part, once for all rows, and every row's KV cache."""
    decode_tokens_per_second: float | None
    """Of all rows together: whichever of bandwidth and FLOP/s runs out first."""
    prefill_seconds: float | None
    """Of all rows' prompts of seq_len tokens, at the peak, without what the mask hides."""
    training_tokens_per_second: float | None
    """As measured, or at the given MFU, or at the peak."""
    mfu: float | None
    """As given, or of the measured speed (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
    devices_to_run: int | None
    """Whose memory would hold weights and KV cache, split without loss."""
    devices_to_train: int | None
    """The same of what training keeps."""


def estimate_limits(
    config: Config,
    seq_len: int,
    batch_size: int,
    dtype: str,
    inference: InferenceMemory,
    training: TrainingMemory | None,
    on: Hardware,
) -> Limits:
    """Of `batch_size` rows at `seq_len` tokens. `on` is settled."""
    flops = count_flops(config, seq_len)
    read = _decode_bytes(config, batch_size, dtype) + inference.kv_cache
    peak = on.peak_flops * on.n_devices if on.peak_flops else None
    decode_seconds = read / (on.bandwidth * on.n_devices) if on.bandwidth else None
    if decode_seconds is not None and peak is not None:
        # A step is one token a row, multiplied with every key: a full pass's share of it.
        decode_seconds = max(decode_seconds, batch_size * flops.forward_per_token / peak)
    mfu, training_speed = on.mfu, on.tokens_per_second
    if peak is not None and training_speed is not None:
        mfu = training_speed * flops.training_per_token / peak
        if mfu > 1:
            raise UserError(
                f"{training_speed:g} tokens/s would be an MFU of {mfu:.3g}: the speed, peak_flops or n_devices is wrong"
            )
    elif peak is not None:
        training_speed = (mfu or 1.0) * peak / flops.training_per_token
    return Limits(
        hardware=on,
        decode_bytes=read,
        decode_tokens_per_second=batch_size / decode_seconds if decode_seconds else None,
        prefill_seconds=batch_size * flops.forward_causal / peak if peak else None,
        training_tokens_per_second=training_speed,
        mfu=mfu,
        devices_to_run=math.ceil(inference.total / on.memory) if on.memory else None,
        devices_to_train=math.ceil(training.total / on.memory) if on.memory and training else None,
    )


def _decode_bytes(config: Config, batch_size: int, dtype: str) -> int:
    """Of the weights that a decoding step reads.

    Of a table one row a token is read, which is not counted. Of the experts, those that any row is sent to: where all
    are equally likely, n_experts (1 − (1 − n_experts_per_token / n_experts)^batch_size).
    """
    parameters = count_parameters(config)
    weights = parameters.active - parameters.position_embedding
    if not config.tie_embeddings:
        weights -= parameters.token_embedding
    idle = config.n_experts - config.n_experts_per_token
    if config.n_experts and idle:
        an_expert = (parameters.total - parameters.active) / idle
        used = config.n_experts * (1 - (idle / config.n_experts) ** batch_size)
        weights += round((used - config.n_experts_per_token) * an_expert)
    return DTYPES[dtype].size(weights)


@dataclass(frozen=True)
class TrainingRun:
    """Training on `tokens` tokens, each seen once."""

    tokens: float
    tokens_per_parameter: float
    flops: float
    """training_full over all sequences."""
    six_nd: float
    """6 · parameters · tokens, the rule of thumb that scaling laws count in."""
    seconds: float | None
    """At the speed of `Limits.training_tokens_per_second`."""
    losses: dict[str, float]
    """Nats a token by law, each for the text it was fitted to. Empty for a mixture of experts, of which none speaks."""


def estimate_run(config: Config, seq_len: int, tokens: float, limits: Limits | None) -> TrainingRun:
    """Of training in sequences of `seq_len`."""
    parameters = count_parameters(config)
    losses = {
        "Kaplan 2020, L(N)": kaplan_loss_of_parameters(parameters.non_embedding),
        "Kaplan 2020, L(D)": kaplan_loss_of_tokens(tokens),
        **{fit.name: fit.loss(parameters.total, tokens) for fit in CHINCHILLA_FITS},
    }
    a_second = None if limits is None else limits.training_tokens_per_second
    return TrainingRun(
        tokens=tokens,
        tokens_per_parameter=tokens / parameters.total,
        flops=count_flops(config, seq_len).training_per_token * tokens,
        six_nd=6 * parameters.total * tokens,
        seconds=None if a_second is None else tokens / a_second,
        losses={} if config.n_experts else losses,
    )


# ---- all of it


@dataclass(frozen=True)
class Plan:
    """The answer of `plan`. What was not asked for, or cannot be known, is None."""

    name: str | None
    config: Config
    seq_len: int
    batch_size: int
    dtype: str
    parameters: Parameters
    flops: Flops
    kv_cache: KVCacheSize
    inference: InferenceMemory
    training: TrainingMemory | None
    limits: Limits | None
    run: TrainingRun | None
    compute_optimal: ComputeOptimal | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


def plan(
    config: Config,
    *,
    name: str | None = None,
    seq_len: int | None = None,
    batch_size: int = 1,
    dtype: str = "bf16",
    kv_dtype: str | None = None,
    optimizer: OptimizerName = "muon",
    tokens: float | None = None,
    flops: float | None = None,
    **hardware: Any,
) -> Plan:
    """What `config` costs.

    Args:
        name: for people to read.
        seq_len: tokens of a sequence; None: max_seq_len.
        batch_size: sequences at a time, in training and in decoding.
        dtype: of the weights (DTYPES); training is planned for fp32 and bf16.
        kv_dtype: of the KV cache; None: dtype, or bf16 where that is a quantised one.
        tokens: to train on: adds what the training costs and which loss the laws expect.
        flops: adds the compute-optimal size and tokens for this budget.
        hardware: fields of Hardware; any adds what it allows.

    Raises:
        UserError: a setting does not fit.
    """
    length = config.max_seq_len if seq_len is None else seq_len
    _check(config, length, batch_size, tokens, hardware)
    for setting, value, valid in (
        ("dtype", dtype, tuple(DTYPES)),
        ("kv_dtype", kv_dtype or "bf16", tuple(DTYPES)),
        ("optimizer", optimizer, typing.get_args(OptimizerName)),
    ):
        if value not in valid:
            raise UserError(f"{setting} is {value!r}: {nearest(str(value), valid)}")
    weights = DTYPES[dtype].size(count_parameters(config).total)
    kv_cache = count_kv_cache(config, length, batch_size, kv_dtype or (dtype if dtype in _COMPUTED_IN else "bf16"))
    inference = InferenceMemory(weights, kv_cache.bytes, weights + kv_cache.bytes)
    training = count_training_memory(config, length, batch_size, dtype, optimizer) if dtype in _TRAINED_IN else None
    limits = None
    if hardware:
        on = Hardware(**hardware).settled(dtype)
        limits = estimate_limits(config, length, batch_size, dtype, inference, training, on)
    return Plan(
        name=name,
        config=config,
        seq_len=length,
        batch_size=batch_size,
        dtype=dtype,
        parameters=count_parameters(config),
        flops=count_flops(config, length),
        kv_cache=kv_cache,
        inference=inference,
        training=training,
        limits=limits,
        run=None if tokens is None else estimate_run(config, length, tokens, limits),
        compute_optimal=None if flops is None else compute_optimal(flops),
    )


def _short(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:40]


def _check(config: Config, seq_len: int, batch_size: int, tokens: float | None, hardware: dict[str, Any]) -> None:
    if not 1 <= seq_len <= config.max_seq_len:
        raise UserError(
            f"seq_len is {seq_len}: it must be between 1 and the model's max_seq_len {config.max_seq_len} (to plan for "
            "more, set that too)"
        )
    if not 1 <= batch_size < 2**31:
        raise UserError(f"batch_size is {batch_size}: it must be at least 1 and below 2^31")
    if tokens is not None and not 1 <= tokens <= _MOST:
        raise UserError(f"tokens is {tokens:g}: it must be at least 1 and at most {_MOST:g}")
    valid = [field.name for field in dataclasses.fields(Hardware)]
    if unknown := [key for key in hardware if key not in valid]:
        raise UserError(f"unknown setting {unknown[0]}: {nearest(unknown[0], valid)}")
