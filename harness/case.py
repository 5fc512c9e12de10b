"""Case: one configuration of fused attention as plain data, with its rules, its canonical JSON and its id."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from harness.layouts import LAYOUTS, Layout

SCHEMA = 2
DTYPES = ("bf16", "fp16", "fp32")
MASKS = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
)
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
BIAS_SHAPES = ("1hss", "11ss", "b1ss", "bhss", "111s")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
DIFFERENTIABLE = ("q", "k", "v", "attn_bias", "softmax_offset")
OUTPUT_GRADIENTS = ("contiguous", "transposed", "expanded", "sliced", "quantized")
FP8_RECIPES = ("none", "delayed", "current", "mxfp8", "hybrid")
FP8_FORMATS = ("HYBRID", "E4M3")
SCENARIOS = (
    "plain",
    "two_graphs",
    "second_backward",
    "inplace_edit",
    "environment_changed",
    "scale_changed",
    "cu_seqlens_changed",
    "recipe_changed",
    "checkpoint",
    "checkpoint_reentrant",
    "hooks_copy",
    "hooks_cpu",
    "hooks_strided",
    "output_deleted",
    "no_grad",
    "alternating",
    "offload",
    "offload_v1",
    "fav2_backward",
    "graph_capture",
    "nvtx",
    "debug_prints",
)
BACKWARD_SCENARIOS = frozenset(SCENARIOS) - {
    "plain",
    "output_deleted",
    "no_grad",
    "alternating",
    "nvtx",
    "debug_prints",
}
"""The scenarios that are about a backward pass, and so need a gradient to be asked for."""
GENERATORS = ("default", "own")
MAX_SIZE = 1 << 16


class CaseError(ValueError):
    """A case that no call of FusedAttnFunc can mean; the message names the field, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration, in TransformerEngine's own terms where it has them.

    Sizes are in elements and tokens. ``requires_grad`` names the tensor inputs whose gradient is asked for;
    ``pad_between_seqs`` leaves rows that belong to no sequence between and after those of a THD layout, and lets a
    sequence be empty; ``page_size`` is in tokens, and a paged layout needs it.
    ``output_grad`` is how the gradient of the output lies in memory; ``generator`` says whether ``rng_gen`` is given;
    ``seed`` draws every tensor, sequence length and generator state. ``attn_scale`` None means 1/sqrt(head_dim_qk).

    ``fp8_recipe`` is which quantizers are given: ``delayed``, ``current`` (S and dP delayed), ``mxfp8``, or ``hybrid``
    (QKV and dO current, the rest delayed); ``fp8_format`` HYBRID is E4M3 forward and E5M2 backward. ``fp8_input`` gives
    quantized q, k and v. ``fp8_dpa_bwd`` is NVTE_FP8_DPA_BWD, and ``fp8_cs_o_in_f16`` NVTE_DPA_FP8CS_O_in_F16 as the
    source finds it when it is loaded. ``packed_given`` is whether the buffer of a packed layout is handed over beside
    its views. ``scenario`` is what happens around the passes.
    """

    qkv_layout: str = "sbhd_sbhd_sbhd"
    dtype: str = "bf16"
    batch_size: int = 2
    num_heads: int = 4
    num_gqa_groups: int = 4
    max_seqlen_q: int = 16
    max_seqlen_kv: int = 16
    head_dim_qk: int = 8
    head_dim_v: int = 8
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool | None = None
    attn_bias_type: str = "no_bias"
    bias_shape: str = "1hss"
    softmax_type: str = "vanilla"
    dropout_p: float = 0.0
    attn_scale: float | None = None
    is_training: bool = True
    deterministic: bool = False
    fast_zero_fill: bool = True
    return_max_logit: bool = False
    generator: str = "default"
    pad_between_seqs: bool = False
    page_size: int | None = None
    requires_grad: tuple[str, ...] = ("q", "k", "v")
    output_grad: str = "contiguous"
    layer_number: int = 1
    fp8_recipe: str = "none"
    fp8_format: str = "HYBRID"
    fp8_input: bool = False
    fp8_output: bool = False
    fp8_dpa_bwd: bool = True
    fp8_cs_o_in_f16: bool = True
    bf16_backward: bool = False
    packed_given: bool = True
    scenario: str = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dropout_p", "attn_scale"):  # 0 and -0.0 equal 0.0, so they must not have ids of their own
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, value + 0.0)
        for rule in RULES:  # in order: a later rule may rely on an earlier one
            message = rule(self)
            if message is not None:
                raise CaseError(message)

    @property
    def layout(self) -> Layout:
        """The row of the layout table that ``qkv_layout`` names."""
        return LAYOUTS[self.qkv_layout]

    @property
    def has_bias(self) -> bool:
        """Whether a bias tensor is given."""
        return self.attn_bias_type in ("pre_scale_bias", "post_scale_bias")

    @property
    def has_softmax_offset(self) -> bool:
        """Whether a softmax offset tensor is given."""
        return self.softmax_type != "vanilla"

    @property
    def fp8(self) -> bool:
        """Whether the forward pass runs in FP8."""
        return self.fp8_recipe != "none"

    @property
    def id(self) -> str:
        """Twelve hex digits of the hash of the canonical JSON: equal cases have equal ids on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, in the order of the class, led by the schema version."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"schema": SCHEMA} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
        }

    def to_json(self) -> str:
        """Return the canonical JSON: one line, fixed order, no spaces."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False)

    def replace(self, **changes: Any) -> Case:
        """Return the case with some fields changed; the rules are checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Case:
        """Read a case from JSON values.

        Fields left out take their default; a case of an older schema is brought up to this one. Raises CaseError for
        an unknown field, a schema that is not known, a value of another type and a broken rule.
        """
        if not isinstance(data, Mapping):
            raise CaseError(f"a case is a JSON object, not {type(data).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        fields = dict(data)
        schema = fields.pop("schema", SCHEMA)
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise CaseError(
                f"schema={_shown(schema)} is not one that this version reads; it reads schema=1 to {SCHEMA}"
            )
        for version in range(schema, SCHEMA):
            fields = MIGRATIONS[version](fields)
        for name in fields:
            if name not in known:
                raise CaseError(f"unknown field {_shown(name)}{nearest(str(name)[:80], known)}")
        hints = _hints()
        return cls(**{name: _coerce(name, value, hints[name]) for name, value in fields.items()})

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read a case from JSON text; raises CaseError as ``from_dict`` does, and for text that is no JSON."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CaseError(f"not JSON: {error}") from error
        return cls.from_dict(data)


def _from_schema_1(fields: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had no FP8 and no scenarios: every field that it lacks has the default that it meant."""
    later = ("fp8_recipe", "fp8_format", "fp8_input", "fp8_output", "fp8_dpa_bwd", "fp8_cs_o_in_f16", "bf16_backward",
             "packed_given", "scenario")  # fmt: skip
    for name in later:
        if name in fields:
            raise CaseError(f"unknown field {name!r} in a case of schema=1; it came with schema=2")
    return fields


MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_schema_1}
"""From each older schema to the next: takes and returns the fields without ``schema``."""


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Case)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'a' or 'b'?`` with the known names nearest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(match) for match in matches)}?" if matches else ""


def _coerce(name: str, value: Any, hint: Any) -> Any:
    """Return ``value`` as the type of the field, or raise CaseError; a whole number may stand for a float."""
    options = get_args(hint) if get_origin(hint) is not tuple and get_args(hint) else (hint,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            inner = get_args(option)
            if inner[-1] is Ellipsis or len(inner) == len(value):
                return tuple(_coerce(name, item, inner[0]) for item in value)
        if option is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                return float(value)
        if option in (int, str, bool) and type(value) is option:
            return value
    wanted = " or ".join("null" if option is type(None) else getattr(option, "__name__", str(option))
                         for option in options)  # fmt: skip
    raise CaseError(f"{name}={_shown(value)} has the wrong type; it takes {wanted}")


def _shown(value: Any) -> str:
    """Return the value for a message, cut where it is long; its type where Python itself cannot show it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in a list in a list ...
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:77] + "..."


def _one_of(name: str, allowed: Iterable[str]) -> Callable[[Case], str | None]:
    options = tuple(allowed)

    def rule(case: Case) -> str | None:
        value = getattr(case, name)
        if value in options:
            return None
        return f"{name}={_shown(value)} is not one of {', '.join(options)}{nearest(str(value)[:80], options)}"

    return rule


def _size(name: str) -> Callable[[Case], str | None]:
    def rule(case: Case) -> str | None:
        value = getattr(case, name)
        if 1 <= value <= MAX_SIZE:
            return None
        return f"{name}={_shown(value)} is out of range; it takes 1 to {MAX_SIZE}"

    return rule


def _when(condition: Callable[[Case], bool], message: str) -> Callable[[Case], str | None]:
    def rule(case: Case) -> str | None:
        if not condition(case):
            return None
        fields = case.to_dict().items()
        return message.format(**{name: value if isinstance(value, str) else _shown(value) for name, value in fields})

    return rule


def causal(mask: str) -> bool:
    """Whether an attn_mask_type is one of the causal kinds."""
    return "causal" in mask


def padding(mask: str) -> bool:
    """Whether an attn_mask_type is one of the padding kinds."""
    return "padding" in mask


RULES: tuple[Callable[[Case], str | None], ...] = (
    _one_of("qkv_layout", LAYOUTS),
    _one_of("dtype", DTYPES),
    *(
        _size(name)
        for name in (
            "batch_size",
            "num_heads",
            "num_gqa_groups",
            "max_seqlen_q",
            "max_seqlen_kv",
            "head_dim_qk",
            "head_dim_v",
        )
    ),
    _one_of("attn_mask_type", MASKS),
    _one_of("attn_bias_type", BIAS_TYPES),
    _one_of("bias_shape", BIAS_SHAPES),
    _one_of("softmax_type", SOFTMAX_TYPES),
    _one_of("output_grad", OUTPUT_GRADIENTS),
    _one_of("generator", GENERATORS),
    _one_of("fp8_recipe", FP8_RECIPES),
    _one_of("fp8_format", FP8_FORMATS),
    _one_of("scenario", SCENARIOS),
    _when(
        lambda case: case.num_heads % case.num_gqa_groups != 0,
        "num_gqa_groups={num_gqa_groups} does not divide num_heads={num_heads}",
    ),
    _when(
        lambda case: case.layout.parts == 1 and case.num_gqa_groups != case.num_heads,
        "qkv_layout={qkv_layout} holds q, k and v in one buffer, so num_gqa_groups={num_gqa_groups} must equal "
        "num_heads={num_heads}",
    ),
    _when(
        lambda case: case.layout.parts == 1 and case.max_seqlen_q != case.max_seqlen_kv,
        "qkv_layout={qkv_layout} holds q, k and v in one buffer, so max_seqlen_q={max_seqlen_q} must equal "
        "max_seqlen_kv={max_seqlen_kv}",
    ),
    _when(
        lambda case: case.layout.parts < 3 and case.head_dim_qk != case.head_dim_v,
        "qkv_layout={qkv_layout} holds k and v in one buffer, so head_dim_qk={head_dim_qk} must equal "
        "head_dim_v={head_dim_v}",
    ),
    _when(
        lambda case: len(case.window_size) != 2 or min(case.window_size) < -1 or max(case.window_size) > MAX_SIZE,
        f"window_size={{window_size}} takes two whole numbers up to {MAX_SIZE}, -1 meaning unbounded",
    ),
    _when(
        lambda case: causal(case.attn_mask_type) and case.window_size[1] != 0,
        "window_size={window_size}: a causal mask (attn_mask_type={attn_mask_type}) takes a right bound of 0",
    ),
    _when(
        lambda case: not case.has_bias and case.bias_shape != "1hss",
        "bias_shape={bias_shape} has no meaning with attn_bias_type={attn_bias_type}; leave it out",
    ),
    _when(
        lambda case: not (math.isfinite(case.dropout_p) and 0.0 <= case.dropout_p < 1.0),
        "dropout_p={dropout_p} is out of range; it takes 0.0 up to, not including, 1.0",
    ),
    _when(
        lambda case: case.attn_scale is not None and not (math.isfinite(case.attn_scale) and case.attn_scale > 0),
        "attn_scale={attn_scale} is out of range; it takes a positive number or null",
    ),
    _when(
        lambda case: not case.is_training and case.dropout_p != 0.0,
        "dropout_p={dropout_p} with is_training=false: callers send 0.0 in evaluation",
    ),
    _when(
        lambda case: not set(case.requires_grad) <= set(DIFFERENTIABLE),
        "requires_grad={requires_grad} names what has no gradient; it takes " + ", ".join(DIFFERENTIABLE),
    ),
    _when(
        lambda case: list(case.requires_grad) != [name for name in DIFFERENTIABLE if name in case.requires_grad],
        "requires_grad={requires_grad} takes each name once, in the order " + ", ".join(DIFFERENTIABLE),
    ),
    _when(
        lambda case: "attn_bias" in case.requires_grad and not case.has_bias,
        "requires_grad={requires_grad} names attn_bias, and attn_bias_type={attn_bias_type} has none",
    ),
    _when(
        lambda case: "softmax_offset" in case.requires_grad and case.softmax_type != "learnable",
        "requires_grad={requires_grad} names softmax_offset, and softmax_type={softmax_type} learns none",
    ),
    _when(
        lambda case: case.layout.parts == 1 and len({"q", "k", "v"} & set(case.requires_grad)) in (1, 2),
        "requires_grad={requires_grad}: qkv_layout={qkv_layout} has one buffer, so q, k and v go together",
    ),
    _when(
        lambda case: case.layout.parts == 2 and len({"k", "v"} & set(case.requires_grad)) == 1,
        "requires_grad={requires_grad}: qkv_layout={qkv_layout} has one buffer for k and v, so they go together",
    ),
    _when(
        lambda case: case.pad_between_seqs and not case.layout.thd,
        "pad_between_seqs=true has no meaning with qkv_layout={qkv_layout}; only THD layouts have such rows",
    ),
    _when(
        lambda case: case.page_size is not None and not case.layout.paged,
        "page_size={page_size} has no meaning with qkv_layout={qkv_layout}; leave it out",
    ),
    _when(
        lambda case: case.layout.paged and (not case.page_size or case.page_size < 1
                                            or case.max_seqlen_kv % case.page_size != 0),
        "page_size={page_size}: qkv_layout={qkv_layout} needs one that divides max_seqlen_kv={max_seqlen_kv}",
    ),
    _when(
        lambda case: case.fp8 and case.dtype == "fp32",
        "dtype={dtype} with fp8_recipe={fp8_recipe}: quantized tensors stand for bf16 or fp16",
    ),
    *(
        _when(
            lambda case, name=name, off=off: not case.fp8 and getattr(case, name) != off,  # type: ignore[misc]
            f"{name}={{{name}}} has no meaning with fp8_recipe=none; leave it out",
        )
        for name, off in (
            ("fp8_format", "HYBRID"),
            ("fp8_input", False),
            ("fp8_output", False),
            ("fp8_cs_o_in_f16", True),
            ("bf16_backward", False),
        )
    ),
    _when(
        lambda case: not case.packed_given and case.layout.packing is None,
        "packed_given=false has no meaning with qkv_layout={qkv_layout}, which has no packed buffer; leave it out",
    ),
    _when(
        lambda case: case.output_grad == "quantized" and case.fp8_recipe in ("none", "mxfp8"),
        "output_grad=quantized with fp8_recipe={fp8_recipe}: it takes delayed, current or hybrid",
    ),
    _when(
        lambda case: case.scenario in BACKWARD_SCENARIOS and not case.requires_grad,
        "scenario={scenario} needs a backward pass, and requires_grad={requires_grad} asks for no gradient",
    ),
    _when(
        lambda case: case.scenario == "scale_changed" and case.fp8_recipe in ("none", "mxfp8"),
        "scenario=scale_changed with fp8_recipe={fp8_recipe}: it needs quantizers with a scale (delayed, current or "
        "hybrid)",
    ),
    _when(
        lambda case: case.scenario == "recipe_changed" and not case.fp8,
        "scenario=recipe_changed with fp8_recipe={fp8_recipe}: there is no recipe to change",
    ),
    _when(
        lambda case: case.scenario == "fav2_backward" and (
            case.fp8 or case.has_softmax_offset or case.attn_bias_type != "no_bias"
            or case.head_dim_qk != case.head_dim_v or case.layout.q_format == "sbhd" or case.layout.kv_format == "sbhd"
        ),
        "scenario=fav2_backward takes no FP8, bias, ALiBi or softmax offset, one head dimension, and tensors that lie "
        "as [b, s, h, d] or [t, h, d]; not fp8_recipe={fp8_recipe}, attn_bias_type={attn_bias_type}, "
        "softmax_type={softmax_type}, head_dim_qk={head_dim_qk}, head_dim_v={head_dim_v}, qkv_layout={qkv_layout}",
    ),
    _when(
        lambda case: not 0 <= case.seed < 1 << 63,
        "seed={seed} is out of range; it takes 0 to 2**63 - 1",
    ),
)  # fmt: skip
