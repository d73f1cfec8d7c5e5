"""Splits text into words by the name that GGUF files have for a pre-tokenizer (tokenizer.ggml.pre).

The patterns are those of the models' tokenizer.json. Source of the names: llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from typing import Final

from tokenizers import Regex, pre_tokenizers

_ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_TAIL_WITH_SLASH: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, ending: str) -> str:
    """Returns the pattern that begins a new word at each capital letter, of these classes of letters."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}[{upper}]*[{lower}]+{ending}|{before}[{upper}]+[{lower}]*{ending}"


_CASED: Final = _cased(_UPPER, _LOWER, f"{_ENDINGS}?")
_NOT_HAN: Final = r"&&[^\p{Han}]"
_KIMI: Final = _cased(_UPPER + _NOT_HAN, _LOWER + _NOT_HAN, f"{_ENDINGS}?")
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2: Final = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_TAIL}"
_FROM_THE_RIGHT: Final = r"{1,3}(?=(?:DIGIT{3})*(?!DIGIT))"
"""Groups of three digits, of which the first may be shorter."""
_ASCII_WORD: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED: Final = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK: Final = rf"{_ASCII_WORD}|{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CJK: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_HANGUL: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PHRASE: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_ASIAN: Final = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_HANGUL_OR_CJK: Final = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}"
)
_CASED_LETTERS: Final = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of alphabets with capitals."""

PATTERNS: Final[dict[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "afmoe": (rf"\p{{N}}{_FROM_THE_RIGHT}".replace("DIGIT", r"\p{N}"), _ASIAN, _DEEPSEEK),
    "bailingmoe": (rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",),
    "bloom": (_PHRASE,),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}"),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+\z",
        _CJK_HANGUL,
        r"\p{N}+",
    ),
    "deepseek-v3": (r"\p{N}{1,3}", _CJK, _DEEPSEEK),
    "exaone-moe": (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "gpt-4o": (rf"{_CASED}|\p{{N}}{{1,3}}|{_TAIL_WITH_SLASH}",),
    "jais-2": (
        rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))
        + r"|\s{1,2}(?!\S)|\s",
    ),
    "kimi-k2": (rf"\p{{Han}}+|{_KIMI}|\p{{N}}{{1,3}}|{_TAIL}",),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "llama-bpe": (_LLAMA3,),
    "minicpm5": (r"\p{N}{1,3}", rf"{_ENDINGS}|{_LETTERS}|\p{{N}}+|{_TAIL}"),
    "qwen2": (_QWEN2,),
    "qwen35": (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "seed-coder": (rf"{_ENDINGS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "smollm": (r"\p{N}", _GPT2),
    "spark2_5": (r"\p{N}{1,3}", _CJK, rf"{_ASCII_WORD}|{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"),
    "superbpe": (r"\p{N}+", rf"\d{_FROM_THE_RIGHT}".replace("DIGIT", r"\d")),
    "tekken": (rf"{_cased(_UPPER, _LOWER, '')}|\p{{N}}|{_TAIL_WITH_SLASH}",),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", rf"{_CASED}|\p{{N}}{{1,3}}|{_TAIL_WITH_SLASH}"),
    "ufakzeka": (rf"{_LETTERS}|\p{{N}}|{_TAIL}",),
    "viking": (_PHRASE, r"\p{N}"),
    "youtu": (_HANGUL_OR_CJK, rf"{_CASED}|\p{{N}}|{_TAIL_WITH_SLASH}"),
}
"""Patterns by which text is split one after another: each match is a word, and so is what is left between two."""
ALIASES: Final = {
    "bailingmoe": (
        "bailingmoe2",
        "llada-moe",
    ),
    "bloom": (
        "gpt3-finnish",
        "poro-chat",
    ),
    "deepseek-v3": (
        "hunyuan-dense",
        "hy_v4",
        "joyai-llm",
    ),
    "gpt-2": (
        "gpt2",
        "a.x-4.0",
        "exaone4",
        "gigachat",
        "granite-docling",
        "jais",
        "jina-de",
        "jina-es",
        "jina-v1-en",
        "jina-v2-code",
        "jina-v2-de",
        "jina-v2-es",
        "mellum",
        "modern-bert",
        "mpt",
        "olmo",
        "phi-2",
        "roberta-bpe",
        "trillion",
    ),
    "gpt-4o": (
        "granite-embed-multi-97m",
        "kanana2",
        "llama4",
        "minimax-m2",
        "talkie",
    ),
    "llama-bpe": (
        "llama3",
        "llama-v3",
        "chatglm-bpe",
        "dbrx",
        "falcon-h1",
        "falcon3",
        "glm4",
        "jina-v5-nano",
        "lfm2",
        "midm-2.0",
        "pixtral",
        "smaug-bpe",
    ),
    "qwen2": (
        "deepseek-r1-qwen",
        "f2llmv2",
        "grok-2",
        "hunyuan",
        "kormo",
        "megrez",
        "solar-open",
        "stablelm2",
    ),
    "smollm": (
        "codeshell",
        "command-r",
        "exaone",
        "mellum2",
        "minerva-7b",
        "refact",
        "starcoder",
    ),
    "tiny_aya": ("cohere2moe",),
}
"""Other names of the same patterns."""
NAMES: Final = {name: name for name in PATTERNS} | {name: kind for kind, names in ALIASES.items() for name in names}
"""Every known name -> the one in PATTERNS."""
BOS_BY_DEFAULT: Final = frozenset(
    (
        "chameleon",
        "falcon-h1",
        "falcon3",
        "jina-v5-nano",
        "lfm2",
        "llama-bpe",
        "llama-v3",
        "llama3",
        "midm-2.0",
        "pixtral",
        "tekken",
    )
)
"""Names whose files begin a text with BOS if they do not say."""
IGNORE_MERGES: Final = (BOS_BY_DEFAULT - {"chameleon"}) | {"granite-embed-multi-97m", "minicpm5", "youtu"}
"""Names of vocabularies in which a word that is a token is that token, whatever the merges give."""


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Returns the pre-tokenizer of a name in NAMES."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[NAMES[name]]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
