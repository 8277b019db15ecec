"""Several ranks train what one rank trains: real processes over gloo, on one machine.

Expected values are those of one process without any of it: the same recipe through the same public door.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import leftward as lw
from leftward.config import Config
from leftward.errors import UserError
from leftward.model.decoder import Decoder
from leftward.training import current, loop
from leftward.training.parallel import Grid, World, joined
from leftward.training.progress import Interrupted, Observer
from leftward.training.recipe import Recipe
from leftward.training.rehearsal import rehearse
from leftward.training.sharding import cuts

PROCESSES = multiprocessing.get_context("forkserver")  # which imports torch once for all of them
PROCESSES.set_forkserver_preload(["leftward.training.shards", "leftward.training.loop", "leftward.runs"])


# ---- many ranks, several tasks one after the other in each


def on_ranks(n, *tasks, join=True):
    """Call each (function, argument, …) on every one of n ranks, which have joined unless a task does that itself; what
    each rank exits with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [PROCESSES.Process(target=_rank, args=(rank, n, port, tasks, join)) for rank in range(n)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(900)  # ranks that wait for each other take long on a machine with much else to do
    assert all(rank.exitcode is not None for rank in ranks), "a rank hangs"
    return [rank.exitcode for rank in ranks]


def _rank(rank, n, port, tasks, join):
    numbers = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with joined() if join else contextlib.nullcontext():
        for function, *arguments in tasks:
            function(*arguments)


def train(recipe):
    lw.train(recipe, observer=Observer())


def resume(directory, *overrides):
    lw.resume(directory, *overrides, observer=Observer())


def train_until_one_rank_is_told_to_stop(recipe, step, rank):
    real = loop._Training._step

    def watched(training):
        if training.state.step == step and training.world.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        real(training)

    loop._Training._step = watched
    try:
        with pytest.raises(Interrupted) as caught:
            train(recipe)
        assert caught.value.saved
    finally:
        loop._Training._step = real


# ---- what to train


def recipe_of(recipe, out, **sections):
    """Four steps of four heads, two of them for keys, and each section laid over."""
    sections.setdefault("model", {})
    base = {
        "model": {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96, "max_seq_len": 32},
        "training": {**recipe["training"], "max_steps": 4, "eval_interval": 2, "save_interval": 100},
    }
    merged = {name: {**base.get(name, recipe.get(name, {})), **fields} for name, fields in sections.items()}
    return {**recipe, **base, **merged, "out": str(out)}


def lines(directory):
    """metrics.jsonl without the clock."""
    path = Path(directory) / "metrics.jsonl"
    return [
        {key: value for key, value in json.loads(line).items() if key != "elapsed_s"}
        for line in path.read_text().splitlines()
    ]


def assert_same_run(directory, expected, rel=1e-6):
    """Equal losses at every step and evaluation, and equal weights published."""
    ours, theirs = lines(directory), lines(expected)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        assert line.keys() == other.keys()
        for key, value in line.items():
            # A gradient's norm is of small differences of large sums.
            assert value == pytest.approx(other[key], rel=rel * (20 if key == "grad_norm" else 1)), (key, line, other)
    assert (Path(directory) / "config.json").read_text() == (Path(expected) / "config.json").read_text()
    state, reference = (lw.load(path).decoder.state_dict() for path in (directory, expected))
    for name, weight in reference.items():
        assert torch.allclose(state[name], weight, rtol=1e-3, atol=1e-4), name


TWO_RANKS = {
    "fsdp": {},
    "fsdp-adamw-packed": {
        "data": {"packing": "documents", "document_separator": "\n"},
        "optimizer": {"name": "adamw", "adamw_lr": 0.003, "weight_decay": 0.1},
        "training": {"micro_batch_size": 2},
    },
    "tensor": {"parallel": {"tensor": 2}, "optimizer": {"weight_decay": 0.1}},
    "replicate-recompute": {"parallel": {"replicate": 2, "recompute": "blocks"}},
    # How unevenly experts are used is counted by micro-batch, so one rank takes as many rows at a time.
    "experts": {
        "model": {"n_experts": 4, "n_experts_per_token": 2, "qk_norm": "none"},
        "training": {"micro_batch_size": 4},
    },
    "sampled": {"training": {"sample_prompts": ["The"], "max_steps": 2}},
}
FOUR_RANKS = {
    "fsdp": {"model": {"tie_embeddings": False, "block": "sandwich"}},
    # With everything that isn't cut or is cut in parts: biases, sinks, a norm of queries and keys, one summed bias.
    "fsdp-tensor": {
        "parallel": {"tensor": 2, "recompute": "blocks"},
        "model": {"qkv_bias": True, "attn_out_bias": True, "ff_bias": True, "attn_sinks": True},
        "data": {"packing": "documents", "document_separator": "\n"},
        "training": {"micro_batch_size": 2},
    },
}


def all_of(recipe, tmp_path, scenarios):
    """Train each on the ranks that there will be, and alone: (of ranks, alone) by name."""
    pairs = {}
    for name, sections in scenarios.items():
        alone = {key: value for key, value in sections.items() if key != "parallel"}
        together = recipe_of(recipe, tmp_path / name, **{key: dict(value) for key, value in sections.items()})
        pairs[name] = together, recipe_of(recipe, tmp_path / f"{name}-alone", **alone)
        train(pairs[name][1])
    return pairs


def train_looked_at(recipe):
    """And leave what is answered at step 2 beside it."""
    run = Path(recipe["out"])

    class Looker(Observer):
        def stepped(self, progress):
            current.ask(run)
            if progress.step == 3:
                directory, step = current.newest(run)
                assert step == 2
                torch.save(lw.load(directory).decoder.state_dict(), run.with_suffix(".answer"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(current, "_SHARE", 1e9)
        lw.train(recipe, observer=Looker())


def train_compiled(recipe):
    """By the compiler's front end alone: what it makes of a graph takes a minute."""
    torch.compile = functools.partial(torch.compile, backend="eager")
    compiled, real = [], torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: (compiled.append(type(module).__name__), real(module, backend="eager"))
    train(recipe)
    assert len(compiled) == recipe["model"]["n_layers"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_two_ranks_train_what_one_trains(recipe, tmp_path):
    pairs = all_of(recipe, tmp_path, TWO_RANKS)
    pairs["compiled"] = (
        recipe_of(recipe, tmp_path / "compiled", training={"compile": True}, parallel={"tensor": 2}),
        pairs["fsdp"][1],
    )
    looked_at = recipe_of(recipe, tmp_path / "looked-at")
    train_looked_at(alone := recipe_of(recipe, tmp_path / "looked-at-alone"))
    *tasks, (_, compiled) = ((train, together) for together, _ in pairs.values())
    assert on_ranks(2, *tasks, (train_looked_at, looked_at), (train_compiled, compiled)) == [0, 0]
    answer, expected = (torch.load(Path(each["out"]).with_suffix(".answer")) for each in (looked_at, alone))
    assert answer.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(answer[name], weight, rtol=1e-3, atol=1e-4), name
    for together, alone in pairs.values():
        assert_same_run(together["out"], alone["out"])
    texts = [(tmp_path / name / "samples.jsonl").read_text() for name in ("sampled", "sampled-alone")]
    assert texts[0] == texts[1] != ""


def test_four_ranks_train_what_one_trains_and_any_number_goes_on(recipe, tmp_path):
    pairs = all_of(recipe, tmp_path, FOUR_RANKS)
    stopped = recipe_of(recipe, tmp_path / "stopped", parallel={"tensor": 2})
    whole = recipe_of(recipe, tmp_path / "whole")
    train(whole)
    assert (
        on_ranks(
            4,
            *((train, together) for together, _ in pairs.values()),
            (train_until_one_rank_is_told_to_stop, stopped, 1, 2),
            (count_collectives, recipe_of(recipe, tmp_path / "counted", **COUNTED), tmp_path / "counts.json"),
        )
        == [0] * 4
    )
    for together, alone in pairs.values():
        assert_same_run(together["out"], alone["out"])
    newest = tmp_path / "stopped" / "checkpoints" / "step-00000002"  # the step that the signal came before was made
    held = {path.name for path in newest.iterdir()}
    assert held == {
        "state.json",
        "tensors.json",
        *(f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2, 3, 4)),
    }
    for what, reason in (("unlink", "a part of .* is missing"), ("truncate", "[Ii]ncomplete")):
        damaged = shutil.copytree(tmp_path / "stopped", tmp_path / what)
        shard = damaged / "checkpoints" / newest.name / "shard-00002-model-00001-of-00001.safetensors"
        shard.unlink() if what == "unlink" else os.truncate(shard, shard.stat().st_size - 100)
        with pytest.raises(UserError, match=f"step-00000002 is damaged .*({reason})"):
            lw.resume(damaged, "parallel.tensor=1", observer=Observer())
    shutil.copytree(tmp_path / "stopped", tmp_path / "alone")
    lw.resume(tmp_path / "alone", "parallel.tensor=1", observer=Observer())
    # … from one rank to two, and from four to two
    begun = recipe_of(recipe, tmp_path / "begun")
    train_until_one_rank_is_told_to_stop(begun, 0, 0)
    tasks = [(resume, tmp_path / "stopped", "parallel.tensor=1"), (resume, tmp_path / "begun", "parallel.tensor=2")]
    assert on_ranks(2, *tasks) == [0, 0]
    for name in ("alone", "stopped", "begun"):
        assert_same_run(tmp_path / name, whole["out"])
    measured = json.loads((tmp_path / "counts.json").read_text())
    planned = {}
    for one in rehearse(Recipe.from_dict(recipe_of(recipe, tmp_path / "x", **COUNTED)), 4).collectives:
        count, sent = planned.get(one.kind, (0, 0))
        planned[one.kind] = [count + one.count, sent + one.bytes]
    assert measured == planned


COUNTED = {
    "parallel": {"tensor": 2, "recompute": "blocks"},
    "training": {"micro_batch_size": 2},
    "tokenizer": {"kind": "char", "vocab_size": 28},
}


class Counted(TorchDispatchMode):
    """Counts what this rank sends, of each kind: how often, and bytes."""

    KINDS = {
        "allgather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "allreduce": "all_reduce",
        "alltoall": "all_to_all",
    }

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.found = ranks, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        space, name = function.name().replace("all_", "all").split("::")
        kind = next((kind for begin, kind in self.KINDS.items() if name.startswith((begin, f"_{begin}"))), None)
        if space not in ("c10d", "_c10d_functional") or kind is None:
            return result
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        if tensors[0].dtype == torch.float64:  # agreeing on losses and clocks
            return result
        sent = tensors[1].nbytes  # of an all-to-all, what goes in
        if kind != "all_to_all":
            whole = max(tensor.nbytes for tensor in tensors)
            sent = (2 if kind == "all_reduce" else 1) * whole * (self.ranks - 1) // self.ranks
        count, total = self.found.get(kind, (0, 0))
        self.found[kind] = (count + 1, total + sent)
        return result


def count_collectives(recipe, path):
    real, counts = loop._Training._step, []

    def counted(training):
        with Counted(2) as mode:  # in each of the groups that exchange anything but matrices
            real(training)
        counts.append(mode.found)

    loop._Training._step = counted
    try:
        train(recipe)
    finally:
        loop._Training._step = real
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(counts[1]))


# ---- how all of them end


def command(arguments, errors, fault=None):
    """`leftward ARGUMENTS` as torchrun starts it; the second step of rank 1 may fail."""
    from leftward.cli import main

    real = loop._Training._step

    def failing(training):
        if training.state.step == 1 and training.world.rank == 1:
            if fault == "refused":
                raise UserError("the disk of rank 1 is full")
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        real(training)

    loop._Training._step = failing
    sys.argv = ["leftward", *arguments]
    with open(f"{errors}-{os.environ['RANK']}", "w") as file:
        os.dup2(file.fileno(), 2)
        main.run()


def said(path):
    """The words of both ranks to the user."""
    text = "".join(Path(f"{path}-{rank}").read_text() for rank in (0, 1))
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("leftward: ")]


def test_what_is_wrong_on_one_rank_or_on_all_ends_all_with_one_line(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe.from_dict(recipe_of(recipe, tmp_path / "run")).to_yaml())
    run = ["train", str(path)]
    assert on_ranks(2, (command, run, tmp_path / "one", "refused"), join=False) == [2, 2]
    assert said(tmp_path / "one") == ["leftward: the disk of rank 1 is full"]
    goes_on = ["train", "--resume", str(tmp_path / "run")]
    assert on_ranks(2, (command, goes_on, tmp_path / "gone", "killed"), join=False) == [2, -signal.SIGKILL]
    (line,) = said(tmp_path / "gone")
    assert line.startswith("leftward: another rank is gone without a word")
    wrong = [
        *run,
        f"out={tmp_path / 'other'}",
        "model.n_heads=3",
        "model.head_dim=8",
        "model.n_kv_heads=3",
        "parallel.tensor=2",
    ]
    assert on_ranks(2, (command, wrong, tmp_path / "all"), join=False) == [2, 2]
    (line,) = said(tmp_path / "all")
    assert "parallel.tensor is 2, but model.n_heads 3 is not divisible by 2; model.n_kv_heads 3 is not" in line
    assert not (tmp_path / "other").exists()


def test_torchrun_lets_the_words_out(recipe, tmp_path):
    """It ends all ranks as soon as one has ended, which is not the one that speaks."""
    path = tmp_path / "recipe.yaml"
    path.write_text(Recipe.from_dict(recipe_of(recipe, tmp_path / "run") | {"training": {"batch_size": 8}}).to_yaml())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, "-m", "leftward", "train", path], capture_output=True, text=True, env=environment)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("leftward: ")]
    assert "training.batch_size 8 is not divisible by 3 ranks: take a multiple of 3, or fewer ranks" in line
    assert not (tmp_path / "run").exists()


# ---- without any rank


@pytest.mark.parametrize("grid", [Grid(1, 2, 1), Grid(1, 3, 2), Grid(2, 4, 2), Grid(1, 5, 1)])
def test_all_parts_together_are_the_whole(grid):
    config = Config(vocab_size=13, n_layers=1, d_model=24, n_heads=4, n_kv_heads=2, head_dim=6, d_ff=10, qkv_bias=True)
    weights = dict(Decoder(config).named_parameters())
    for name, cut in cuts(config).items():
        found = torch.zeros(cut.shape)
        for rank in range(grid.shard * grid.tensor):
            place = grid.place(rank)
            local = cut.own(weights[name].detach(), grid, place)
            assert tuple(local.shape) == cut.local_shape(grid, place)
            for piece in cut.pieces(grid, place):
                if cut.dim is None and place.tensor:
                    continue
                assert (found[piece.whole] == 0).all()  # nobody else's
                found[piece.whole] = local[piece.local]
        assert torch.equal(found, weights[name]), name


def test_a_tensor_rank_has_whole_heads():
    config = Config(vocab_size=13, n_layers=1, d_model=8, n_heads=4, n_kv_heads=2, head_dim=2, d_ff=6)
    rows = torch.arange(16.0)[:, None].expand(16, 8)  # 4 queries of 2, then 2 keys, then 2 values
    second = cuts(config)["blocks.0.attn.qkv.weight"].own(rows, Grid(1, 1, 2), Grid(0, 0, 1))
    assert second[:, 0].tolist() == [4, 5, 6, 7, 10, 11, 14, 15]
    hidden = torch.arange(12.0)[:, None].expand(12, 8)  # the gate's 6, then 6
    assert cuts(config)["blocks.0.ff.up.weight"].own(hidden, Grid(1, 1, 2), Grid(0, 0, 1))[:, 0].tolist() == [
        3,
        4,
        5,
        9,
        10,
        11,
    ]


def test_ranks_that_make_no_grid_are_refused(recipe, tmp_path):
    with pytest.raises(
        UserError, match="parallel.replicate 2 × parallel.tensor 2 needs a multiple of 4 ranks, .* are 6"
    ):
        Grid.of(6, 2, 2)
    with pytest.raises(UserError, match=r"parallel.tensor 2 needs a multiple of 2 ranks, and there is 1: .*torchrun"):
        World().arrange(Recipe.from_dict(recipe_of(recipe, tmp_path / "x", parallel={"tensor": 2})))


@pytest.mark.parametrize(
    "sections, reason",
    [
        ({"model": {"qk_norm": "whole"}}, "a norm over all heads"),
        ({"model": {"positions": "alibi"}}, "a slope a head"),
        ({"model": {"n_experts": 4}}, "experts .* are not cut"),
        ({"model": {"d_ff": 95}}, "model.d_ff 95 is not divisible by 2"),
        ({"training": {"seq_len": 31}}, "training.seq_len 31 is not divisible by 2"),
        ({"training": {"batch_size": 9}}, "batch_size 9 is not divisible by 2 ranks"),
        ({"training": {"sample_prompts": ["x"]}}, "sample_prompts"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(recipe, tmp_path, sections, reason):
    tokenizer = {"kind": "char", "vocab_size": 28}
    values = recipe_of(recipe, tmp_path / "x", parallel={"tensor": 2}, tokenizer=tokenizer, **sections)
    with pytest.raises(UserError, match=reason):
        rehearse(Recipe.from_dict(values), 4)


def test_a_rehearsal_is_what_one_counts_by_hand(recipe, tmp_path):
    tokenizer = {"kind": "char", "vocab_size": 28}
    values = recipe_of(recipe, tmp_path / "x", parallel={"tensor": 2}, tokenizer=tokenizer)
    found = rehearse(Recipe.from_dict(values), 4)
    # A block of 32 wide on 2 × 2 ranks: qkv 64 × 32, o 32 × 32, gate and up 192 × 32 and down 32 × 96 over four; two
    # norms of 32 and two of 8 over the two that share rows out. Outside a table of 28 × 32 and a norm, over those two.
    matrices, vectors, outside = (
        (64 * 32 + 32 * 32 + 192 * 32 + 32 * 96) // 4,
        (32 + 32 + 8 + 8) // 2,
        (28 + 1) * 32 // 2,
    )
    assert found.shapes["blocks.N.attn.qkv.weight"] == (16, 32) and found.shapes["blocks.N.ff.down.weight"] == (16, 48)
    numbers = 2 * (matrices + vectors) + outside
    assert found.memory.weights == found.memory.gradients == 4 * numbers
    # Muon keeps one average of each matrix; AdamW two, and how many steps it took, of two tensors and four a block
    assert found.memory.optimizer == 4 * (2 * matrices + 2 * (2 * vectors + outside) + 2 + 2 * 4)
    # what two ranks share: twice their part
    block, root = 2 * (matrices + vectors), 2 * outside
    assert found.memory.gathered == 4 * (root + 2 * block) + 4 * (root + block)
    assert found.rows == 4 and found.micro_batches == 1 and found.tokens == 8 * 32
    weights, grads, tokens, sums, uncut, muon = found.collectives
    assert (weights.count, weights.bytes) == (2 * 2 + 1, 4 * (2 * 2 * block + root) // 2)
    assert (grads.count, grads.bytes) == (3, 4 * (2 * block + root) // 2)
    assert (tokens.count, tokens.bytes) == (sums.count, sums.bytes) == (4 * 2, 4 * 2 * (4 * 32 * 32 * 4) // 2)
    assert (uncut.count, uncut.bytes) == (2 + 2 * 4, 4 * (2 * vectors + outside))
    # The first rank gets the largest matrix of each round of four: gate and up, then q, k and v.
    assert (muon.count, muon.bytes) == (2 * 2, 4 * (2 * matrices + 192 * 32 + 64 * 32))


def test_the_command_tells_what_ranks_would_hold(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    tokenizer = {"kind": "char", "vocab_size": 28}
    sections = recipe_of(recipe, tmp_path / "x", parallel={"tensor": 2}, tokenizer=tokenizer)
    path.write_text(Recipe.from_dict(sections).to_yaml())
    command = [sys.executable, "-m", "leftward", "train", str(path), "--ranks", "4"]
    told = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True).stdout
    assert "on 4 ranks: replicate 1 × shard 2 × tensor 2, computing in fp32" in told
    assert re.search(r"^weights +26.12 KiB$", told, re.MULTILINE)  # as above: 6,688 numbers
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--ranks is for --dry-run" in refused.stderr


def test_a_run_of_one_process_may_compute_blocks_again(recipe, tmp_path):
    recipes = [recipe_of(recipe, tmp_path / how, parallel={"recompute": how}) for how in ("none", "blocks")]
    for each in recipes:
        train(each)
    assert lines(recipes[0]["out"]) == lines(recipes[1]["out"])
