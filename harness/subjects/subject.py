"""A loaded subject: the sliced source, run with the seam bound to an engine, and the way it is called."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import linecache
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.engines.api import Engine
from harness.subjects.slicer import Import, SliceError, slice_source
from harness.subjects.source import Source

TENSOR_PARAMETERS = ("q", "k", "v", "attn_bias", "softmax_offset")

PARAMETERS = (
    "is_training", "max_seqlen_q", "max_seqlen_kv", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded", "page_table_k", "page_table_v", "q", "k", "v", "attn_bias", "attn_scale", "dropout_p",
    "fast_zero_fill", "qkv_layout", "attn_bias_type", "attn_mask_type", "softmax_type", "window_size",
    "bottom_right_diagonal", "rng_gen", "fused_attention_backend", "use_FAv2_bwd", "fp8", "fp8_meta", "quantizers",
    "deterministic", "softmax_offset", "fp8_output", "bf16_backward", "layer_number", "return_max_logit",
    "packed_qkv", "packed_kv",
)  # fmt: skip
"""Everything that a version of the function takes, by name. Source: TransformerEngine 2.16 to 2.20."""

BAG = "FusedAttnFwdArgs"
"""The class of the argument bag where no annotation names another. Source: TransformerEngine 2.20."""

_serial = itertools.count()


class LoadError(ValueError):
    """A source that this engine cannot run; the message says what it needs and what to do."""


@dataclass(frozen=True, slots=True)
class Convention:
    """How a subject is called, read from the signature of its ``forward`` by parameter name.

    ``parameters`` are the names after ``ctx``; ``bag`` is the class of the argument bag, or None where every value is
    a positional argument; ``defaults`` are those of the parameters that may be left out.
    """

    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    bag: type | None
    bag_parameter: str | None = None

    def check(self, names: Collection[str]) -> None:
        """Raise LoadError for a parameter or a field of the bag that is not among ``names`` and has no default."""
        for name in self.parameters:
            if name not in names and name not in self.defaults and name != self.bag_parameter:
                raise LoadError(f"forward takes {name!r}, which has no default and no meaning to this harness")
        for name, has_default in self._fields():
            if name not in names and not has_default:
                raise LoadError(f"{self.bag.__name__ if self.bag else ''} takes {name!r}, which has no default and no "
                                "meaning to this harness")  # fmt: skip

    def takes(self, name: str) -> bool:
        """Whether a value of this name has a place in a call: as a parameter, or as a field of the bag."""
        return name in self.parameters or any(name == known for known, _ in self._fields())

    def arguments(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the positional arguments for a call with the named values.

        A parameter without a value takes its default. It is left out where no parameter with a value follows, as a
        caller that does not know it would do.
        """
        arguments: list[Any] = []
        given = [index for index, name in enumerate(self.parameters) if name in values or name == self.bag_parameter]
        for name in self.parameters[: max(given, default=-1) + 1]:
            if self.bag is not None and name == self.bag_parameter:
                fields = [field for field, _ in self._fields()]
                arguments.append(self.bag(**{field: values[field] for field in fields if field in values}))
            elif name in values:
                arguments.append(values[name])
            else:
                arguments.append(self.defaults[name])
        return tuple(arguments)

    def _fields(self) -> list[tuple[str, bool]]:
        """Return the fields that the bag's constructor takes, and whether each has a default."""
        if self.bag is None:
            return []
        parameters = inspect.signature(self.bag).parameters.values()
        return [(parameter.name, parameter.default is not parameter.empty) for parameter in parameters]


@dataclass(frozen=True, slots=True)
class Subject:
    """An implementation of FusedAttnFunc that can be called.

    ``function`` is the autograd function's class; each of ``on_backward`` is called with what its raw ``backward``
    returned.
    """

    source: Source
    function: type[torch.autograd.Function]
    convention: Convention
    on_backward: list[Callable[[Any], None]]

    def call(self, values: Mapping[str, Any]) -> Any:
        """Run the forward pass with the named values, as autograd records it."""
        return self.function.apply(*self.convention.arguments(values))  # type: ignore[no-untyped-call]

    def tensor_inputs(self, values: Mapping[str, Any]) -> list[str]:
        """Return the names of the parameters that autograd sees as tensors in a call with the named values."""
        return [name for name in self.convention.parameters if isinstance(values.get(name), torch.Tensor)]


def load(source: Source, engine: Engine, seam: Mapping[str, object] | None = None) -> Subject:
    """Load a subject onto an engine.

    ``seam`` replaces the engine's own where calls are to be watched. Raises SliceError where the source cannot be
    taken apart and LoadError where the engine lacks what it needs or running the definitions fails.
    """
    bound = dict(seam if seam is not None else engine.seam())
    part = slice_source(source.text, source.resolved, source.name, bound, also=(BAG,))
    module = types.ModuleType(f"harness_subject_{source.sha256[:8]}_{next(_serial)}")
    module.__file__ = source.resolved
    module.__package__ = ""  # a relative import fails at once: there is no package around a slice
    linecache.cache[source.resolved] = (
        len(source.text), None, source.text.splitlines(keepends=True), source.resolved,
    )  # fmt: skip
    missing: list[str] = []
    for local, name in part.seam.items():
        setattr(module, local, bound[name])
    for wanted in part.real:
        setattr(module, wanted.local, _import(wanted, source))
    for wanted in part.foreign:
        try:
            if engine.name != "cudnn" or wanted.level:
                raise ImportError
            setattr(module, wanted.local, _import(wanted, source))
        except (ImportError, LoadError):
            missing.append(str(wanted))
    if missing:
        raise LoadError(
            f"{source.spec}: {source.name} needs {', '.join(sorted(missing))}, which the {engine.name} engine does not "
            "have; it binds the names of the seam only"
        )
    sys.modules[module.__name__] = module  # dataclass looks its module up here
    try:
        code = compile(part.tree, source.resolved, "exec", dont_inherit=True)  # not this file's __future__
        exec(code, module.__dict__)
    except BaseException as error:  # SystemExit too: a source that ends the process must not end the run as neutral
        raise LoadError(f"{source.spec}: its definitions cannot be run: {type(error).__name__}: {error}") from error
    function = getattr(module, source.name)
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise LoadError(f"{source.spec}: {source.name} is not a torch.autograd.Function")
    convention = _convention(function, module, source)
    try:
        convention.check(PARAMETERS)
    except LoadError as error:
        raise LoadError(f"{source.spec}: {error}") from None
    on_backward: list[Callable[[Any], None]] = []
    original = function.backward

    def backward(ctx: Any, *gradients: Any) -> Any:
        result = original(ctx, *gradients)
        for watcher in on_backward:
            watcher(result)
        return result

    function.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Subject(source, function, convention, on_backward)


def _import(wanted: Import, source: Source) -> Any:
    try:
        module = importlib.import_module(wanted.module)
        for submodule in wanted.submodules:
            importlib.import_module(submodule)
    except ImportError as error:
        raise LoadError(f"{source.spec}: it imports {wanted.module}, which is not installed here: {error}") from error
    if wanted.original is None:
        return module
    try:
        return getattr(module, wanted.original)
    except AttributeError:
        try:
            return importlib.import_module(f"{wanted.module}.{wanted.original}")
        except ImportError as error:
            raise LoadError(f"{source.spec}: {wanted.module} has no {wanted.original}") from error


def _convention(function: type, module: types.ModuleType, source: Source) -> Convention:
    parameters = list(inspect.signature(function.forward).parameters.values())[1:]  # type: ignore[attr-defined]
    if any(parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
           for parameter in parameters):  # fmt: skip
        raise LoadError(f"{source.spec}: forward takes *args or keyword-only values, and autograd passes neither")
    names = tuple(parameter.name for parameter in parameters)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    absent = [name for name in TENSOR_PARAMETERS if name not in names]
    if absent:
        raise LoadError(f"{source.spec}: forward has no parameter {', '.join(absent)}; it takes {', '.join(names)}")
    if "qkv_layout" in names:
        return Convention(names, defaults, None)
    others = [parameter for parameter in parameters if parameter.name not in TENSOR_PARAMETERS]
    for parameter in others:
        annotation = parameter.annotation
        if isinstance(annotation, str):
            annotation = getattr(module, annotation, None)
        if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
            return Convention(names, defaults, annotation, parameter.name)
    bag = getattr(module, BAG, None)
    if isinstance(bag, type) and len(others) == 1:
        return Convention(names, defaults, bag, others[0].name)
    raise LoadError(f"{source.spec}: forward({', '.join(names)}) takes neither every value by position nor five "
                    "tensors and a bag whose dataclass an annotation names")  # fmt: skip


__all__ = ["Convention", "LoadError", "SliceError", "Subject", "load"]
