"""Case -> Inputs: every tensor that a call takes, drawn from the case's seed, in memory that hides nothing.

Each buffer lies between two red zones of NaN (integers: of a value that is no valid offset; bytes: of NaN in either
FP8 format), so that a read or write outside it shows. Rows past a sequence's end hold large finite values: a kernel
that lets them in gives a visibly wrong result, and one that multiplies them by zero does not turn the whole tile into
NaN. Where these rows share a scale with real ones, as in FP8, they are only so large that the real ones keep their
precision.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from harness.case import Case, padding
from harness.quantized import FORMATS, Quantizers, parts, scales, slot_kind

if TYPE_CHECKING:
    from harness.engines.api import Engine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RED_ZONE_BYTES = 512
RED_ZONE_INTEGER = -(2**30) - 7
RED_ZONE_BYTE = 0x7F
PADDING_POISON = 1024.0
FP8_PADDING_POISON = 14.0
"""What E4M3 holds exactly as its largest number under a scale of 32, which standard normal entries go well with."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation: a flat tensor with a red zone at both ends, and the shape of what lies between them."""

    flat: torch.Tensor
    margin: int
    shape: tuple[int, ...]

    def inner(self) -> torch.Tensor:
        """Return the contiguous tensor between the red zones, as a view of ``flat``."""
        size = self.flat.numel() - 2 * self.margin
        return self.flat[self.margin : self.margin + size].view(self.shape)

    def clone(self) -> Buffer:
        """Return a buffer of its own memory with the same bits, red zones included."""
        return Buffer(self.flat.clone(), self.margin, self.shape)


@dataclass(slots=True)
class Live:
    """One set of tensors to call a subject with, in memory that no other call shares.

    ``tensors`` maps the names of FusedAttnFunc's tensor parameters to tensors; a name that the case has no tensor for
    is absent. ``leaves`` are the tensors that gradients accumulate in: the packed buffer itself in a packed layout,
    each part by itself where the inputs are quantized. ``output_grad`` has the output's shape. ``generator`` is None
    where the default generator is meant; ``quantizers`` and ``fp8_meta`` are None without FP8. ``originals`` hold what
    each buffer held when it was handed over.
    """

    buffers: dict[str, Buffer]
    tensors: dict[str, torch.Tensor]
    leaves: dict[str, torch.Tensor]
    output_grad: torch.Tensor
    originals: Mapping[str, Buffer]
    generator: torch.Generator | None = None
    quantizers: Quantizers | None = None
    fp8_meta: dict[str, Any] | None = None
    original_meta: dict[str, Any] | None = None

    def changes_of_meta(self) -> str:
        """Return ``unchanged`` where ``fp8_meta`` holds what it was made of, else ``changed``."""
        return "unchanged" if self.fp8_meta == self.original_meta else "changed"

    def edit(self, name: str, change: Callable[[torch.Tensor], Any]) -> None:
        """Have the caller itself write to a buffer: ``change`` is given what lies between the red zones."""
        original = self.originals[name].clone()  # it may be the master of all sets
        self.originals = {**self.originals, name: original}
        with torch.no_grad():
            change(self.buffers[name].inner())
            change(original.inner())


@dataclass(frozen=True, slots=True)
class Inputs:
    """The master copy of a case's tensors: ``fresh()`` gives a set to call a subject with, ``changes`` checks it after.

    ``q`` and ``kv`` say where the tokens of each side lie.
    """

    case: Case
    masters: dict[str, Buffer]
    q: Geometry
    kv: Geometry

    def fresh(
        self,
        generator: torch.Generator | None = None,
        engine: Engine | None = None,
        quantizers: Quantizers | None = None,
    ) -> Live:
        """Return a set of tensors in memory of their own, with the case's requires_grad pattern.

        An FP8 case needs the engine, whose classes quantize, and takes ``quantizers`` that are in use already.
        """
        case = self.case
        buffers = {name: master.clone() for name, master in self.masters.items()}
        leaves: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, held in _parts(case).items():
            leaf = buffers[name].inner()
            leaves[name] = leaf.requires_grad_(held[0] in case.requires_grad)
            if len(held) == 1:
                tensors[held[0]] = leaf
            else:
                tensors |= {part: leaf.select(self._packed_dim, index) for index, part in enumerate(held)}
                if case.packed_given:
                    tensors["packed_qkv" if len(held) == 3 else "packed_kv"] = leaf
        for name in ("attn_bias", "softmax_offset"):
            if name in buffers:
                tensors[name] = leaves[name] = buffers[name].inner().requires_grad_(name in case.requires_grad)
        for name in buffers:
            if name.startswith(("cu_seqlens", "page_table")):
                tensors[name] = buffers[name].inner()
        gradient = _stride(buffers["output_grad"].inner(), case)
        live = Live(buffers, tensors, leaves, gradient, self.masters, generator)
        return self._with_fp8(live, engine, quantizers) if case.fp8 else live

    def _with_fp8(self, live: Live, engine: Engine | None, quantizers: Quantizers | None) -> Live:
        """Add the quantizers and the recipe, and quantize what the case wants quantized."""
        if engine is None:
            raise ValueError(f"fp8_recipe={self.case.fp8_recipe}: the inputs need an engine whose classes quantize")
        case = self.case
        live.quantizers = quantizers or Quantizers.make(case, engine, self._amax())
        recipe = engine.recipe(case.fp8_recipe, case.fp8_format)
        live.fp8_meta = {"recipe": recipe}
        if case.scenario != "recipe_changed":  # there, only the recipe in force tells which it is
            live.fp8_meta["local_recipes"] = [recipe]
        live.original_meta = copy.deepcopy(live.fp8_meta)
        if case.fp8_input:
            _quantize_inputs(case, live, engine, self._own_scale("QKV"))
        if case.output_grad == "quantized":
            quantizer = _quantizer(case, "dO", engine, self._own_scale("dO"))
            with torch.no_grad():
                live.output_grad = quantizer(live.buffers.pop("output_grad").inner())
            _house(live, {"output_grad": live.output_grad})
        return live

    def _amax(self) -> dict[str, float]:
        """Return the largest magnitudes that the quantizers' scales follow from."""
        largest = {name: float(master.inner().abs().max()) for name, master in self.masters.items()
                   if name in (*_parts(self.case), "output_grad")}  # fmt: skip
        qkv = [value for name, value in largest.items() if name != "output_grad"]
        return {"qkv": max(qkv), "v": qkv[-1], "output_grad": largest["output_grad"]}

    def _own_scale(self, slot: str) -> float:
        """Return a scale for the quantizer of an input that comes quantized: half of what the caller's own has."""
        return scales(self.case, self._amax())[slot] / 2

    @property
    def _packed_dim(self) -> int:
        """The dimension of a packed buffer that tells q, k and v apart."""
        return -3 if str(self.case.layout.packing).endswith("hd") else -2

    def parts_of(self, leaf: str) -> tuple[str, ...]:
        """Return which of the function's tensors a leaf holds: ``qkv`` holds three, ``kv`` two, any other itself."""
        return _parts(self.case).get(leaf, (leaf,))

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors of one packed buffer put together as it holds them."""
        return torch.stack(list(tensors), self._packed_dim)

    def changes(self, live: Live) -> dict[str, str]:
        """Return ``unchanged``, ``written`` or ``red zone written`` for each buffer of a used set, by its bits."""
        found = {name: _change(live.originals[name], buffer) for name, buffer in live.buffers.items()}
        if "output_grad" in found:
            given = _stride(live.originals["output_grad"].inner(), self.case)  # it may lie in memory of its own
            if not same_bits(given, live.output_grad):
                found["output_grad"] = "written"
        return found


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the tokens of one side lie, in tokens.

    ``lengths`` are the actual sequence lengths; ``offsets`` [b+1] the first row of each sequence in a THD buffer, and
    the end of the last; ``rows`` how many rows a THD buffer has.
    """

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


def geometry(case: Case) -> tuple[Geometry, Geometry]:
    """Draw where the tokens of q and of kv lie; the same case gives the same on every machine."""
    draw = random.Random(case.seed)
    q = _geometry(case, case.max_seqlen_q, case.layout.q_format, draw)
    if case.layout.parts == 1:
        return q, q
    return q, _geometry(case, case.max_seqlen_kv, case.layout.kv_format, draw)


def _geometry(case: Case, longest: int, layout_format: str, draw: random.Random) -> Geometry:
    """Draw lengths: full without padding, else up to the longest, one of them the longest; and gaps where asked.

    A dense side has no gaps: its padded offsets are its cumulative lengths, which is what callers send.
    """
    lengths = [longest] * case.batch_size
    gaps = [0] * (case.batch_size + 1)
    if padding(case.attn_mask_type):
        lengths = [draw.randint(0 if case.pad_between_seqs else 1, longest) for _ in lengths]
        if case.batch_size > 1 or not any(lengths):
            lengths[draw.randrange(case.batch_size)] = longest
    if case.pad_between_seqs and layout_format == "thd":
        gaps = [draw.randint(0, 3) for _ in gaps[:-1]] + [draw.randint(1, 5)]
    offsets = [0, *itertools.accumulate(length + gap for length, gap in zip(lengths, gaps, strict=False))]
    return Geometry(tuple(lengths), tuple(offsets), offsets[-1] + gaps[-1])


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Draw the tensors of a case; the same case gives the same bits on every machine and device."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = DTYPES[case.dtype]
    q, kv = geometry(case)
    heads = {
        "q": (case.num_heads, case.head_dim_qk),
        "k": (case.num_gqa_groups, case.head_dim_qk),
        "v": (case.num_gqa_groups, case.head_dim_v),
    }
    contents: dict[str, torch.Tensor] = {}
    for name, held in _parts(case).items():
        is_q = held[0] == "q"
        layout_format = case.layout.q_format if is_q else case.layout.kv_format
        inner: tuple[int, ...] = heads[held[0]]
        if len(held) > 1:
            hd = str(case.layout.packing).endswith("hd")
            inner = (len(held), *inner) if hd else (inner[0], len(held), inner[1])
        longest = case.max_seqlen_q if is_q else case.max_seqlen_kv
        contents[name] = _tokens(case, q if is_q else kv, longest, layout_format, inner, generator).to(dtype)
    if case.layout.paged:
        for name in ("k", "v"):
            contents[name], contents[f"page_table_{name}"] = _paged(case, contents[name], generator)
    if case.has_bias:
        contents["attn_bias"] = torch.randn(bias_sizes(case), generator=generator).to(dtype)
    if case.has_softmax_offset:
        offset = torch.zeros(1, case.num_heads, 1, 1)
        if case.softmax_type == "learnable":  # far from zero, and both signs
            drawn = torch.rand(offset.shape, generator=generator) * 2 + 1
            offset = torch.where(torch.arange(case.num_heads).view_as(offset) % 2 == 0, drawn, -drawn)
        contents["softmax_offset"] = offset
    outer = _outer(case, q, case.max_seqlen_q, case.layout.q_format)
    contents["output_grad"] = torch.randn((*outer, case.num_heads, case.head_dim_v), generator=generator).to(dtype)
    for side, place in (("q", q), ("kv", kv)):
        contents[f"cu_seqlens_{side}"] = _int32([0, *itertools.accumulate(place.lengths)])
        if padding(case.attn_mask_type) or case.layout.thd:
            contents[f"cu_seqlens_{side}_padded"] = _int32(place.offsets)
    masters = {name: _buffer(values, device) for name, values in contents.items()}
    return Inputs(case, masters, q, kv)


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _outer(case: Case, place: Geometry, longest: int, layout_format: str) -> tuple[int, ...]:
    """Return the dimensions of a tensor before its heads."""
    if layout_format == "thd":
        return (place.rows,)
    return (case.batch_size, longest) if layout_format.startswith("b") else (longest, case.batch_size)


def _tokens(
    case: Case, place: Geometry, longest: int, layout_format: str, inner: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    """Draw one buffer of tokens; rows that belong to no sequence hold a large number of either sign."""
    values = torch.randn((*_outer(case, place, longest, layout_format), *inner), generator=generator)
    if layout_format == "thd":
        real = torch.zeros(place.rows, dtype=torch.bool)
        for length, start in zip(place.lengths, place.offsets, strict=False):
            real[start : start + length] = True
    else:
        real = torch.arange(longest)[None, :] < torch.tensor(place.lengths)[:, None]
        real = real if layout_format.startswith("b") else real.t()
    real = real.reshape(*real.shape, *(1 for _ in inner))
    return torch.where(real, values, values.sign() * (FP8_PADDING_POISON if case.fp8 else PADDING_POISON))


SPARE_PAGES = 2


def _paged(case: Case, tokens: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a dense k or v spread over shuffled pages of a cache, and the page table [b, pages]."""
    assert case.page_size is not None
    if not case.layout.kv_format.startswith("b"):
        tokens = tokens.transpose(0, 1)
    pages = tokens.reshape(-1, case.page_size, *tokens.shape[2:])
    order = torch.randperm(len(pages) + SPARE_PAGES, generator=generator)
    cache = torch.full((len(order), *pages.shape[1:]), PADDING_POISON, dtype=tokens.dtype)
    cache[order[: len(pages)]] = pages
    if not case.layout.kv_format.startswith("b"):
        cache = cache.transpose(0, 1).contiguous()
    return cache, order[: len(pages)].view(case.batch_size, -1).to(torch.int32)


def bias_sizes(case: Case) -> tuple[int, int, int, int]:
    """Return the four sizes of the bias: batch, heads, query tokens, key tokens."""
    letters = case.bias_shape
    return (
        case.batch_size if letters[0] == "b" else 1,
        case.num_heads if letters[1] == "h" else 1,
        case.max_seqlen_q if letters[2] == "s" else 1,
        case.max_seqlen_kv,
    )


def _parts(case: Case) -> dict[str, tuple[str, ...]]:
    """Return the buffers of q, k and v, and which of them each holds."""
    return {
        1: {"qkv": ("q", "k", "v")},
        2: {"q": ("q",), "kv": ("k", "v")},
        3: {"q": ("q",), "k": ("k",), "v": ("v",)},
    }[case.layout.parts]  # type: ignore[return-value]


def _buffer(values: torch.Tensor, device: torch.device | str) -> Buffer:
    margin = RED_ZONE_BYTES // values.element_size()
    fill = float("nan") if values.is_floating_point() else RED_ZONE_INTEGER
    if values.dtype == torch.uint8:
        fill = RED_ZONE_BYTE
    flat = torch.full((values.numel() + 2 * margin,), fill, dtype=values.dtype, device=values.device)
    flat[margin : margin + values.numel()] = values.reshape(-1)
    return Buffer(flat.to(device), margin, tuple(values.shape))


def _quantizer(case: Case, slot: str, engine: Engine, scale: float) -> Any:
    """Return a quantizer as the one in a slot would be: for a tensor that was quantized before attention got it."""
    mxfp8 = case.fp8_recipe == "mxfp8"
    group = "scaling_bwd" if slot.startswith("d") else "scaling_fwd"
    quantizer = engine.quantizer(slot_kind(case.fp8_recipe, slot), FORMATS[case.fp8_format][group], scale)
    quantizer.set_usage(rowwise=True, columnwise=mxfp8)
    quantizer.optimize_for_gemm = mxfp8
    return quantizer


def _quantize_inputs(case: Case, live: Live, engine: Engine, scale: float) -> None:
    """Put quantized q, k and v in the place of the others, made together as attention itself makes them.

    They share bytes and scale where its own would. No packed buffer goes with them: it is read for quantizing alone.
    """
    combine_and_quantize: Any = engine.seam()["combine_and_quantize"]
    packed = {f"combined_{name.removeprefix('packed_')}": live.tensors.pop(name).detach()
              for name in ("packed_qkv", "packed_kv") if name in live.tensors}  # fmt: skip
    given = [live.tensors[name].detach() for name in ("q", "k", "v")]
    with torch.no_grad():
        made = combine_and_quantize(
            case.qkv_layout, *given, _quantizer(case, "QKV", engine, scale), used_in_backward=case.is_training, **packed
        )
    for name in _parts(case):
        del live.buffers[name], live.leaves[name]
    quantized = dict(zip(("q", "k", "v"), made, strict=False))
    _house(live, quantized)
    for name, tensor in quantized.items():
        live.tensors[name] = live.leaves[name] = tensor.requires_grad_(name in case.requires_grad)


def _house(live: Live, quantized: Mapping[str, Any]) -> None:
    """Move the parts of quantized tensors between red zones, those that share memory into one buffer."""
    sharing: dict[int, list[tuple[str, Any, str, torch.Tensor]]] = {}
    for name, tensor in quantized.items():
        for part, held in parts(tensor).items():
            sharing.setdefault(held.untyped_storage().data_ptr(), []).append((name, tensor, part, held))
    originals = dict(live.originals)
    for together in sharing.values():
        _, _, part, held = together[0]
        whole = held.as_strided((held.untyped_storage().nbytes() // held.element_size(),), (1,), 0)
        buffer = _buffer(whole, whole.device)
        for _, tensor, own, piece in together:
            place = buffer.margin + int(piece.storage_offset())
            setattr(tensor, f"_{own}", buffer.flat.as_strided(piece.shape, piece.stride(), place))
        name = f"{''.join(name for name, *_ in together)}.{part}"
        live.buffers[name], originals[name] = buffer, buffer.clone()
    live.originals = originals


def _stride(gradient: torch.Tensor, case: Case) -> torch.Tensor:
    """Return the output's gradient as the case lays it out in memory; values are those of ``gradient``.

    An expanded gradient repeats its first token, since a stride of zero cannot hold more.
    """
    if case.output_grad == "transposed":
        return gradient.transpose(0, 2).contiguous().transpose(0, 2)
    if case.output_grad == "expanded":
        return gradient[:1, :1].expand_as(gradient)
    if case.output_grad == "sliced":
        wide = torch.full((*gradient.shape[:-1], gradient.shape[-1] + 3), float("nan"),
                          dtype=gradient.dtype, device=gradient.device)  # fmt: skip
        wide[..., 2:-1] = gradient
        return wide[..., 2:-1]
    return gradient


def _change(master: Buffer, used: Buffer) -> str:
    before, after = integers(master.flat), integers(used.flat.detach())
    if torch.equal(before, after):
        return "unchanged"
    inside = slice(master.margin, master.flat.numel() - master.margin)
    return "written" if not torch.equal(before[inside], after[inside]) else "red zone written"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape agree in every bit, NaN included."""
    return torch.equal(integers(left.detach().contiguous()), integers(right.detach().contiguous()))


def integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, so that NaN equals itself."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
