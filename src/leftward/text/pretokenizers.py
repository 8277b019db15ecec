"""How a GGUF file's `tokenizer.ggml.pre` cuts text into words before byte-level BPE: names → regular expressions.

The names are llama.cpp's (src/llama-vocab.cpp); the expressions are those of the models' own tokenizer.json or tiktoken
encoding, which llama.cpp's are written after. Each expression cuts what the one before it has left in pieces; what none
matches is a piece too. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

from leftward.errors import UserError, nearest


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A word that is a token is taken whole, whatever the merges would make of it (as tiktoken does)."""
    adds_bos: bool = False
    """Where the file doesn't say."""


_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_CL100K = f"{_CONTRACTIONS}|{_WORD}" r"\p{N}{1,3}" f"{_SIGNS}{_END}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORD}" r"\p{N}" f"{_SIGNS}{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(contractions: str, digits: str) -> str:
    """o200k's pattern: words are cut where a capital follows a small letter."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = (
        f"{before}{_UPPER}*{_LOWER}+{contractions}",
        f"{before}{_UPPER}+{_LOWER}*{contractions}",
    )
    return "|".join((*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*")) + _END


_O200K = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r""" ?[\p{P}\p{S}]+[\r\n]*""" + _END
)
# DeepSeek LLM's own list of letters that have a case.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_WHITE_RUNS = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}"
_JAIS2 = f"{_CONTRACTIONS}|{_WORD}" r"\p{N}{1,3}" f"{_SIGNS}" r"|\s*[\r\n]+|" f"{_WHITE_RUNS}"

_TABLE: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((_GPT2,)): (
        *("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "mellum"),
        *("a.x-4.0", "modern-bert", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    ),
    PreTokenizer((r"\p{N}", _GPT2)): (
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer((_CL100K,), ignore_merges=True, adds_bos=True): (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    PreTokenizer((_CL100K,)): ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    PreTokenizer((_JAIS2,)): ("jais-2",),
    PreTokenizer((_QWEN2,)): (
        *("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "f2llmv2", "solar-open", "grok-2"),
    ),
    PreTokenizer(
        (f"{_CONTRACTIONS}|" r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" f"{_END}",)
    ): ("qwen35",),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")): ("falcon",),
    PreTokenizer((_BLOOM,)): ("bloom", "poro-chat", "gpt3-finnish"),
    PreTokenizer((_BLOOM, r"\p{N}")): ("viking",),
    PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, adds_bos=True): ("tekken",),
    PreTokenizer((_O200K,)): ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"),
    PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)): ("tiny_aya", "cohere2moe"),
    PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")): ("deepseek-coder",),
    PreTokenizer(
        (
            *("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$"),
            *("[一-龥ࠀ-一가-퟿]+", r"\p{N}+"),
        )
    ): ("deepseek-llm",),
    PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3)): ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")): ("superbpe",),
    PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ): ("bailingmoe", "bailingmoe2", "llada-moe"),
    PreTokenizer((f"{_CONTRACTIONS}|{_WORD}" r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" f"{_END}",)): ("seed-coder",),
}

_BY_NAME = {name: pre_tokenizer for pre_tokenizer, names in _TABLE.items() for name in names}


def pre_tokenizer_of(name: str) -> PreTokenizer:
    """Raises: UserError, for a name that is not known: text would be cut in a way that the model never saw."""
    if name not in _BY_NAME:
        raise UserError(f"tokenizer.ggml.pre is {name!r}: {nearest(name, _BY_NAME)}")
    return _BY_NAME[name]


def name_of(patterns: tuple[str, ...], ignore_merges: bool) -> str | None:
    """GGUF's name for the cut by these patterns; None: it has none."""
    for pre_tokenizer, names in _TABLE.items():
        if (pre_tokenizer.patterns, pre_tokenizer.ignore_merges) == (patterns, ignore_merges):
            return names[0]
    return None
