"""The space of cases as data: factors with levels, what excludes what, and the way from levels to a Case and back.

A level stands for values of Case fields: ``lengths=longer`` for any two lengths with more keys than queries. Covering
sets, strategies, lanes and the coverage of a run all speak of levels; sizes and seeds inside a level are free.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from harness.case import (
    BACKWARD_SCENARIOS,
    BIAS_SHAPES,
    DTYPES,
    FP8_FORMATS,
    FP8_RECIPES,
    GENERATORS,
    MASKS,
    OUTPUT_GRADIENTS,
    RULES,
    SCENARIOS,
    SOFTMAX_TYPES,
    Case,
    causal,
)
from harness.constraints import CONSTRAINTS
from harness.layouts import LAYOUTS

Row = Mapping[str, str]
"""A level for every factor, by name."""

PartialRow = Mapping[str, str | None]
"""The same of a stored case: None where its value is of no level."""

Box = Mapping[str, frozenset[str]]
"""A part of the space: the levels that some factors may take, the rest being free."""

ANYTHING: Box = MappingProxyType({})

T = TypeVar("T")
Choose = Callable[[Sequence[T]], T]


@dataclass(frozen=True, slots=True)
class Factor:
    """One dimension of the space: its levels, the plainest first, and which of them a case has.

    ``values`` are the levels' values where the factor is a field of Case with as many values as levels, else empty.
    """

    name: str
    levels: tuple[str, ...]
    of: Callable[[Case], str | None]
    values: Mapping[str, Any]


def _field(name: str, values: Iterable[Any]) -> Factor:
    """Return the factor that is a field, a level for each of its values."""
    levels = {str(value).lower() if isinstance(value, bool) else str(value): value for value in values}
    spelt = {value: level for level, value in levels.items()}
    return Factor(name, tuple(levels), lambda case: spelt.get(getattr(case, name)), levels)


def _factor(name: str, levels: str, of: Callable[[Case], str | None]) -> Factor:
    return Factor(name, tuple(levels.split()), of, {})


def _heads(case: Case) -> str:
    return "mha" if case.num_gqa_groups == case.num_heads else "mqa" if case.num_gqa_groups == 1 else "gqa"


def _lengths(queries: int, keys: int) -> str:
    if queries == keys:
        return "self"
    return "shorter" if keys < queries else "one_query" if queries == 1 else "longer"


def _head_dims(case: Case) -> str:
    if case.head_dim_v == case.head_dim_qk:
        return "equal"
    return "v_smaller" if case.head_dim_v < case.head_dim_qk else "v_larger"


def _window(case: Case) -> str | None:
    left, right = case.window_size
    if left == -1:
        return "none" if right == (0 if causal(case.attn_mask_type) else -1) else None
    return "left" if right == 0 else "both" if right > 0 else None


def _bias(case: Case) -> str:
    return case.bias_shape if case.attn_bias_type == "post_scale_bias" else case.attn_bias_type


def _page(case: Case) -> str:
    return "none" if case.page_size is None else "one" if case.page_size == case.max_seqlen_kv else "several"


def _gradients(case: Case) -> str | None:
    asked = set(case.requires_grad)
    if not asked:
        return "none"
    if "q" not in asked:
        return "kv" if {"k", "v"} & asked else None
    if not {"k", "v"} <= asked:
        return "q"
    if case.has_bias and "attn_bias" not in asked:
        return "without_bias"
    return "without_offset" if case.softmax_type == "learnable" and "softmax_offset" not in asked else "all"


_PLAINEST = "sbhd_sbhd_sbhd"

FACTORS: dict[str, Factor] = {
    factor.name: factor
    for factor in (
        _field("scenario", SCENARIOS),
        _field("fp8_recipe", FP8_RECIPES),
        _field("qkv_layout", (_PLAINEST, *(name for name in LAYOUTS if name != _PLAINEST))),
        _field("attn_mask_type", MASKS),
        _factor("bias", f"no_bias {' '.join(BIAS_SHAPES)} alibi pre_scale_bias", _bias),
        _factor("requires_grad", "all none q kv without_bias without_offset", _gradients),
        _field("output_grad", OUTPUT_GRADIENTS),
        _factor(
            "lengths", "self shorter longer one_query", lambda case: _lengths(case.max_seqlen_q, case.max_seqlen_kv)
        ),
        _field("dtype", DTYPES),
        _factor("heads", "mha gqa mqa", _heads),
        _factor("head_dims", "equal v_smaller v_larger", _head_dims),
        _factor("window_size", "none left both", _window),
        _field("bottom_right_diagonal", (None, False, True)),
        _field("softmax_type", SOFTMAX_TYPES),
        _factor("page_size", "none one several", _page),
        _factor("batch_size", "one several", lambda case: "one" if case.batch_size == 1 else "several"),
        _factor("dropout_p", "zero some", lambda case: "some" if case.dropout_p else "zero"),
        _factor("attn_scale", "default given", lambda case: "default" if case.attn_scale is None else "given"),
        _field("is_training", (True, False)),
        _field("deterministic", (False, True)),
        _field("fast_zero_fill", (True, False)),
        _field("return_max_logit", (False, True)),
        _field("generator", GENERATORS),
        _field("pad_between_seqs", (False, True)),
        _field("packed_given", (True, False)),
        _field("fp8_dpa_bwd", (True, False)),
        _field("fp8_format", FP8_FORMATS),
        _field("fp8_input", (False, True)),
        _field("fp8_output", (False, True)),
        _field("fp8_cs_o_in_f16", (True, False)),
        _field("bf16_backward", (False, True)),
    )
}
"""Every factor; what decides most about the others stands first, and is drawn first."""


def row(case: Case) -> dict[str, str | None]:
    """Return the level of each factor that a case has; None where its value is of no level."""
    return {name: factor.of(case) for name, factor in FACTORS.items()}


# ------------------------------------------------------------------ what excludes what


@dataclass(frozen=True, slots=True)
class Clash:
    """Levels that cannot go together: ``excludes`` takes the levels of ``factors``, in their order.

    ``kernels`` is whether a call could be made and no kernel takes it; else no such call has a meaning. The words for
    it are those of the rule or constraint that it stands for: see ``refusals``.
    """

    id: str
    factors: tuple[str, ...]
    excludes: Callable[..., bool]
    kernels: bool = False


def _only(id_: str, first: str, choices: str, second: str, allowed: str) -> Clash:
    """Return the clash of some levels of one factor with all but some levels of another."""
    some, rest = frozenset(choices.split()), frozenset(allowed.split())
    return Clash(id_, (first, second), lambda one, two: one in some and two not in rest)


def _for_layouts(id_: str, second: str, excludes: Callable[..., bool]) -> Clash:
    return Clash(id_, ("qkv_layout", second), lambda layout, level: excludes(LAYOUTS[layout], level))


_BACKWARD = " ".join(sorted(BACKWARD_SCENARIOS))
_SCALED = "delayed current hybrid"

RULE_CLASHES: tuple[Clash, ...] = (
    _for_layouts("one-buffer-heads", "heads", lambda layout, heads: layout.parts == 1 and heads != "mha"),
    _for_layouts("one-buffer-lengths", "lengths", lambda layout, lengths: layout.parts == 1 and lengths != "self"),
    _for_layouts("shared-kv-dims", "head_dims", lambda layout, dims: layout.parts < 3 and dims != "equal"),
    _for_layouts(
        "one-buffer-gradients", "requires_grad", lambda layout, asked: layout.parts == 1 and asked in ("q", "kv")
    ),
    _for_layouts("gaps-are-ragged", "pad_between_seqs", lambda layout, gaps: gaps == "true" and not layout.thd),
    _for_layouts("pages-are-paged", "page_size", lambda layout, pages: layout.paged != (pages != "none")),
    _for_layouts("packed-buffer", "packed_given", lambda layout, given: given == "false" and layout.packing is None),
    Clash("causal-window", ("attn_mask_type", "window_size"), lambda mask, window: causal(mask) and window == "both"),
    _only("dropout-trains", "is_training", "false", "dropout_p", "zero"),
    _only("bias-to-leave-out", "requires_grad", "without_bias", "bias", f"{' '.join(BIAS_SHAPES)} pre_scale_bias"),
    _only("offset-to-leave-out", "requires_grad", "without_offset", "softmax_type", "learnable"),
    _only("fp8-of-f16", "dtype", "fp32", "fp8_recipe", "none"),
    _only("fp8-format", "fp8_recipe", "none", "fp8_format", "HYBRID"),
    _only("fp8-input", "fp8_recipe", "none", "fp8_input", "false"),
    _only("fp8-output", "fp8_recipe", "none", "fp8_output", "false"),
    _only("fp8-o-in-f16", "fp8_recipe", "none", "fp8_cs_o_in_f16", "true"),
    _only("fp8-bf16-backward", "fp8_recipe", "none", "bf16_backward", "false"),
    _only("quantized-gradient", "output_grad", "quantized", "fp8_recipe", _SCALED),
    Clash(
        "scenario-backward",
        ("scenario", "requires_grad"),
        lambda scenario, asked: scenario in BACKWARD_SCENARIOS and asked == "none",
    ),
    _only("scale-to-change", "scenario", "scale_changed", "fp8_recipe", _SCALED),
    _only("recipe-to-change", "scenario", "recipe_changed", "fp8_recipe", f"{_SCALED} mxfp8"),
    _only("fav2-in-f16", "scenario", "fav2_backward", "fp8_recipe", "none"),
    _only("fav2-softmax", "scenario", "fav2_backward", "softmax_type", "vanilla"),
    _only("fav2-bias", "scenario", "fav2_backward", "bias", "no_bias"),
    _only("fav2-head-dims", "scenario", "fav2_backward", "head_dims", "equal"),
    Clash(
        "fav2-formats",
        ("scenario", "qkv_layout"),
        lambda scenario, layout: (
            scenario == "fav2_backward" and "sbhd" in (LAYOUTS[layout].q_format, LAYOUTS[layout].kv_format)
        ),
    ),
)
"""What the rules of a case exclude, by levels; a test holds them against ``case.RULES`` themselves."""

BLOCK, FP8_DIM = 128, 32

_OF_FIELD: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "attn_bias_type": (("bias",), lambda bias: "post_scale_bias" if bias in BIAS_SHAPES else bias),
    "dropout_p": (("dropout_p",), lambda dropout: 0.1 if dropout == "some" else 0.0),
    "requires_grad": (("requires_grad",), lambda asked: () if asked == "none" else ("q",)),
    "max_seqlen_q": (("lengths",), lambda lengths: 1 if lengths == "one_query" else BLOCK),
    "max_seqlen_kv": ((), lambda: BLOCK),  # the sizes of an MXFP8 case are whole blocks wherever its levels let them
    "head_dim_qk": ((), lambda: FP8_DIM),
    "head_dim_v": ((), lambda: FP8_DIM),
}
"""How a constraint's field follows from levels: of which factors, and the value that counts for the constraints."""


def _of_field(name: str) -> tuple[tuple[str, ...], Callable[..., Any]]:
    if name in _OF_FIELD:
        return _OF_FIELD[name]
    values = FACTORS[name].values
    return (name,), lambda level: values[level]


def _of_constraints() -> Iterator[Clash]:
    for constraint in CONSTRAINTS:
        fields = [_of_field(name) for name in constraint.fields]
        factors = tuple(dict.fromkeys(factor for names, _ in fields for factor in names))

        def excludes(
            *levels: str,
            factors: tuple[str, ...] = factors,
            fields: Sequence[tuple[tuple[str, ...], Callable[..., Any]]] = fields,
            clash: Callable[..., bool] = constraint.excludes,
        ) -> bool:
            at = dict(zip(factors, levels, strict=True))
            return clash(*(value(*(at[name] for name in names)) for names, value in fields))

        yield Clash(constraint.id, factors, excludes, kernels=True)


CLASHES: tuple[Clash, ...] = (*RULE_CLASHES, *_of_constraints())
"""Everything that excludes levels. What is not excluded here can be called, and some kernel may take it."""


RAISING: tuple[Clash, ...] = (
    Clash(
        "bias-gradient-has-the-shape-of-the-offset",
        ("bias", "softmax_type", "requires_grad"),
        lambda bias, softmax, asked: (
            bias not in ("no_bias", "alibi") and softmax != "vanilla" and asked not in ("none", "without_bias")
        ),
    ),
    _only("edit-of-what-is-saved", "scenario", "inplace_edit", "fp8_recipe", f"{_SCALED} mxfp8"),
    _only("edit-of-what-f16-saves", "scenario", "inplace_edit", "fp8_dpa_bwd", "true"),
    Clash("lengths-are-saved", ("scenario",), lambda scenario: scenario == "cu_seqlens_changed"),
)
"""Levels with which every implementation raises, which compares no numbers: a covering set runs them for themselves,
and never as the only case of something else."""


def excluded(levels: Row, clashes: Iterable[Clash] = CLASHES) -> list[Clash]:
    """Return the clashes among the levels; a factor without a level clashes with nothing."""
    return [
        clash
        for clash in clashes
        if all(name in levels for name in clash.factors) and clash.excludes(*(levels[name] for name in clash.factors))
    ]


def everything(box: Box = ANYTHING) -> dict[str, tuple[str, ...]]:
    """Return every factor's levels that lie in the box."""
    return {
        name: tuple(level for level in factor.levels if name not in box or level in box[name])
        for name, factor in FACTORS.items()
    }


def within(levels: PartialRow, box: Box) -> bool:
    """Whether the levels lie in the box."""
    return all(levels[name] in allowed for name, allowed in box.items())


def meet(one: Box, two: Box) -> Box:
    """Return what lies in both boxes; a factor can be left without a level."""
    both = {**one, **two}
    return {name: one[name] & two[name] if name in one and name in two else both[name] for name in both}


def solve(box: Box = ANYTHING, clashes: Sequence[Clash] = CLASHES) -> dict[str, str] | None:
    """Return the first valid row of the box, plain levels tried first; None where the box holds no valid row."""
    domains = everything(box)
    order = sorted(FACTORS, key=lambda name: name not in box)
    place = {name: index for index, name in enumerate(order)}
    closing: list[list[Clash]] = [[] for _ in order]
    for clash in clashes:
        closing[max(place[name] for name in clash.factors)].append(clash)
    bears = [  # at each place, the factors before it that a clash there or later looks at
        sorted({name for later in closing[index:] for clash in later for name in clash.factors if place[name] < index})
        for index in range(len(order))
    ]
    chosen: dict[str, str] = {}
    failed: set[tuple[Any, ...]] = set()

    def search(index: int) -> bool:
        if index == len(order):
            return True
        state = (index, *(chosen[name] for name in bears[index]))
        if state in failed:
            return False
        for level in domains[order[index]]:
            chosen[order[index]] = level
            if not excluded(chosen, closing[index]) and search(index + 1):
                return True
        chosen.pop(order[index], None)
        failed.add(state)
        return False

    return {name: chosen[name] for name in FACTORS} if search(0) else None


# ------------------------------------------------------------------ from levels to a case


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that levels stand for, in tokens and elements, small ones first.

    ``heads`` are pairs of query heads and groups, ``head_dims`` pairs of head dimensions, both by level.
    """

    batches: tuple[int, ...]
    heads: Mapping[str, tuple[tuple[int, int], ...]]
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    head_dims: Mapping[str, tuple[tuple[int, int], ...]]


@cache
def _lengths_of(
    level: str, page_level: str, tokens: tuple[int, ...], pages: tuple[int, ...]
) -> tuple[tuple[int, int, int | None], ...]:
    """Return longest query and key sequence and page size, for the levels of ``lengths`` and ``page_size``."""
    keys: dict[str, list[tuple[int, int | None]]] = {
        "none": [(longest, None) for longest in tokens],
        "one": [(page, page) for page in pages],
        "several": [(page * number, page) for page in pages for number in (2, 3)],
    }
    return tuple(
        (queries, longest, page)
        for longest, page in keys[page_level]
        for queries in sorted({1, longest, *tokens})
        if _lengths(queries, longest) == level
    )


def _pairs(dims: Sequence[int]) -> dict[str, tuple[tuple[int, int], ...]]:
    pairs = list(itertools.product(dims, dims))
    return {
        "equal": tuple(pair for pair in pairs if pair[0] == pair[1]),
        "v_smaller": tuple(pair for pair in pairs if pair[0] > pair[1]),
        "v_larger": tuple(pair for pair in pairs if pair[0] < pair[1]),
    }


_FEW_HEADS: dict[str, tuple[tuple[int, int], ...]] = {
    "mha": ((1, 1), (2, 2), (3, 3), (4, 4)),
    "gqa": ((4, 2), (6, 2), (6, 3), (9, 3), (8, 4)),
    "mqa": ((2, 1), (3, 1)),
}
SMALL = Sizes((2, 3, 5), _FEW_HEADS, (1, 3, 6, 16, 24, 40, 65), (1, 4, 16), _pairs((8, 16, 32, 64)))
BLOCKS = Sizes((2, 3), _FEW_HEADS, (128, 256), (64, 256), _pairs((32, 64, 96)))
CUDNN_FP8 = Sizes((2, 3), _FEW_HEADS, (128, 256), (64, 256), _pairs((64, 128, 192)) | {"equal": ((128, 128),)})

SIZES: tuple[tuple[str | None, tuple[str, ...], Sizes], ...] = (
    ("cudnn", ("delayed", "current", "hybrid"), CUDNN_FP8),
    (None, ("mxfp8",), BLOCKS),
    (None, FP8_RECIPES, SMALL),
)
"""Which sizes a case has, by engine (None: any) and recipe; the first row that fits counts.

MXFP8 quantizes blocks of 128 tokens by 32 elements. cuDNN's other FP8 kernels take a head dimension of 128 in training,
and sequences of a multiple of 128 safely.
"""


def sizes(engine: str, fp8_recipe: str) -> Sizes:
    """Return the sizes of a case with this recipe on this engine."""
    return next(found for name, recipes, found in SIZES if name in (None, engine) and fp8_recipe in recipes)


WINDOWS = {"left": ((4, 0), (0, 0), (1, 0), (13, 0)), "both": ((4, 2), (0, 2), (1, 7), (13, 7))}
SCALES = (0.5, 0.07)
DROPOUTS = (0.1, 0.5)
LAYERS = (1, 7)


def fields_of(levels: Row, choose: Choose[Any], engine: str = "reference") -> dict[str, Any]:
    """Return values for the fields of a Case, all but the seed; ``choose`` picks one of several that a level allows.

    Levels that exclude each other give fields that break a rule.
    """
    layout = LAYOUTS[levels["qkv_layout"]]
    given = sizes(engine, levels["fp8_recipe"])
    num_heads, num_gqa_groups = choose(given.heads[levels["heads"]])
    max_seqlen_q, max_seqlen_kv, page_size = choose(
        _lengths_of(levels["lengths"], levels["page_size"], given.tokens, given.pages)
    )
    head_dim_qk, head_dim_v = choose(given.head_dims[levels["head_dims"]])
    mask, bias, window = levels["attn_mask_type"], levels["bias"], levels["window_size"]
    own = {
        "num_heads": num_heads,
        "num_gqa_groups": num_gqa_groups,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_kv": max_seqlen_kv,
        "page_size": page_size,
        "head_dim_qk": head_dim_qk,
        "head_dim_v": head_dim_v,
        "batch_size": 1 if levels["batch_size"] == "one" else choose(given.batches),
        "window_size": choose(WINDOWS[window]) if window != "none" else (-1, 0 if causal(mask) else -1),
        "attn_bias_type": "post_scale_bias" if bias in BIAS_SHAPES else bias,
        "bias_shape": bias if bias in BIAS_SHAPES else "1hss",
        "dropout_p": choose(DROPOUTS) if levels["dropout_p"] == "some" else 0.0,
        "attn_scale": choose(SCALES) if levels["attn_scale"] == "given" else None,
        "requires_grad": _asked(levels, layout.parts, choose),
        "layer_number": choose(LAYERS),
    }
    return {name: factor.values[levels[name]] for name, factor in FACTORS.items() if factor.values} | own


def _asked(levels: Row, parts: int, choose: Choose[Any]) -> tuple[str, ...]:
    """Return the tensors whose gradient is asked for, at a level of ``requires_grad``."""
    level = levels["requires_grad"]
    if level == "none":
        return ()
    extra = [("attn_bias",)] * (levels["bias"] in (*BIAS_SHAPES, "pre_scale_bias"))
    extra += [("softmax_offset",)] * (levels["softmax_type"] == "learnable")
    asked = ("q", "k", "v")
    if level == "q":
        asked = choose((("q",), ("q", "k"), ("q", "v")) if parts == 3 else (("q",),))
    elif level == "kv":
        asked = choose((("k", "v"), ("k",), ("v",)) if parts == 3 else (("k", "v"),))
    left_out = {"without_bias": "attn_bias", "without_offset": "softmax_offset"}.get(level)
    return (*asked, *(name for (name,) in extra if name != left_out))


def case_of(levels: Row, seed: int, engine: str = "reference") -> Case:
    """Return a case of these levels: the same levels, seed and engine give the same case.

    Its sizes are pairwise different where the levels allow it. Raises CaseError where the levels exclude each other.
    """
    draw = random.Random(seed)
    fields = fields_of(levels, draw.choice, engine)
    for _ in range(24):
        if _coincidences(fields) == 0:
            break
        fields = min(fields, fields_of(levels, draw.choice, engine), key=_coincidences)
    return Case(**fields, seed=seed)


def _coincidences(fields: Mapping[str, Any]) -> int:
    """Return how many sizes equal another that they could differ from."""
    pairs = (("num_gqa_groups", "num_heads"), ("max_seqlen_kv", "max_seqlen_q"), ("head_dim_v", "head_dim_qk"))
    found = [fields["batch_size"], *(fields[second] for _, second in pairs)]
    found += [fields[first] for first, second in pairs if fields[first] != fields[second]]
    return len(found) - len(set(found))


def refusals(levels: Row) -> list[str]:
    """Return the words of every rule and constraint that levels break, in the order of the tables."""
    case = object.__new__(Case)  # a case that its rules would not let be
    for name, value in fields_of(levels, lambda options: options[0]).items():
        object.__setattr__(case, name, value)
    object.__setattr__(case, "seed", 0)
    found = [rule(case) for rule in RULES]
    if not any(found):
        found = [item.refusal({name: getattr(case, name) for name in item.fields}) for item in CONSTRAINTS]
    return [message for message in found if message is not None]


def why_impossible(box: Box) -> list[str]:
    """Return the words of what keeps every case out of a box: the fewest rules and constraints, most of the time one.

    Empty where the box holds a case. Where more than two stand in the way together, all that the plainest row breaks.
    """
    if solve(box) is not None:
        return []
    near = [clash for clash in CLASHES if any(name in box for name in clash.factors)]
    for size in (1, 2):
        for dropped in itertools.combinations(near, size):
            found = solve(box, [clash for clash in CLASHES if clash not in dropped])
            if found is not None:
                return refusals(found)
    found = solve(box, ())
    return refusals(found) if found is not None else ["nothing has all the levels asked for"]
