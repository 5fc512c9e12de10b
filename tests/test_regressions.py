"""Stored cases state the faults that they name, are found wherever the package lies, and are refused where wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.case import SCENARIOS, SCHEMA, Case, CaseError
from harness.constraints import refusal
from harness.engines.api import get_engine
from harness.execute.pair import Pair
from harness.inputs import Geometry, build, geometry
from harness.regressions import FOLDER, KEYS, RegressionError, StoredCase, stored_cases
from harness.subjects.source import Source, resolve

ROOT = Path(__file__).parent.parent
STORED = stored_cases()
BY_NAME = {stored.name: stored for stored in STORED}
GOOD: dict[str, Any] = {
    "schema": 2,
    "row": 6,
    "reference": "somewhere#1",
    "fault": "a fault",
    "kind": "layout",
    "seen_in": "grad",
    "cases": [{"output_grad": "transposed"}, {"output_grad": "expanded"}],
}


def write(folder: Path, name: str = "0006-dout-strides", **changes: Any) -> Path:
    """Write a good file with some keys changed; a key changed to ``...`` is left out."""
    folder.mkdir(exist_ok=True)
    data = {key: value for key, value in (GOOD | changes).items() if value is not ...}
    (folder / f"{name}.json").write_text(json.dumps(data))
    return folder


# ------------------------------------------------------------------ reading


def test_a_file_gives_its_cases_in_order_each_with_what_the_file_says(tmp_path: Path) -> None:
    assert stored_cases(write(tmp_path)) == (
        StoredCase("0006-dout-strides/1", Case(output_grad="transposed"), 6, "somewhere#1", "a fault"),
        StoredCase("0006-dout-strides/2", Case(output_grad="expanded"), 6, "somewhere#1", "a fault"),
    )


def test_files_come_in_the_order_of_their_names_and_what_is_no_json_file_is_left_alone(tmp_path: Path) -> None:
    for seed, name in enumerate(("b", "a", "c")):
        write(tmp_path, name, cases=[{"seed": seed}])
    (tmp_path / "README.md").write_text("no case")
    assert [stored.name for stored in stored_cases(tmp_path)] == ["a/1", "b/1", "c/1"]


def test_a_file_may_stand_for_no_fault_and_may_be_there_to_be_refused(tmp_path: Path) -> None:
    (stored,) = stored_cases(write(tmp_path, row=None, refused=True, cases=[{"attn_bias_type": "pre_scale_bias"}]))
    assert stored.row is None
    assert stored.refused


def test_a_file_of_an_older_schema_gives_the_same_cases(tmp_path: Path) -> None:
    cases = [{"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding", "seed": 3}, {"dtype": "fp16"}]
    old, new = (stored_cases(write(tmp_path / str(schema), schema=schema, cases=cases)) for schema in (1, 2))
    assert old == new


def test_a_case_may_repeat_the_schema_of_its_file_and_have_no_other(tmp_path: Path) -> None:
    case = Case(output_grad="transposed")
    (stored,) = stored_cases(write(tmp_path, cases=[case.to_dict()]))
    assert stored.case == case
    with pytest.raises(RegressionError, match=r"case 1: schema=2 in a file of schema=1; give all its cases the file's"):
        stored_cases(write(tmp_path, schema=1, cases=[case.to_dict()]))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"refrence": "x"}, r"unknown field 'refrence'; did you mean 'reference' or 'refused'\?; it takes schema, row"),
        ({"cases": []}, r"cases=\[\]: give a list of cases"),
        ({"cases": {"seed": 1}}, r"cases=\{'seed': 1\}: give a list of cases"),
        ({"schema": "2"}, r"schema='2': give the schema of the cases, a whole number"),
        ({"schema": True}, r"schema=True: give the schema"),
        ({"schema": 0}, r"case 1: schema=0 is not one that this version reads; it reads schema=1 to 2"),
        ({"schema": 3}, r"case 1: schema=3 is not one that this version reads; it reads schema=1 to 2"),
        ({"row": "6"}, r"row='6': give the fault's number"),
        ({"row": False}, r"row=False: give the fault's number"),
        ({"reference": ""}, r"reference='': give where the fault was reported"),
        ({"fault": ["x"]}, r"fault=\['x'\]: give what the fault is"),
        ({"refused": 1}, r"refused=1: give true where no kernel takes the cases"),
        ({"cases": [{}, "x"]}, r"case 2: a case is a JSON object, not str"),
        ({"cases": [{"num_head": 4}]}, r"case 1: unknown field 'num_head'; did you mean 'num_heads'"),
        ({"cases": [{}, {"batch_size": 0}]}, r"case 2: batch_size=0 is out of range; it takes 1 to"),
        ({"cases": [{"schema": True}], "schema": 1}, r"case 1: schema=True is not one that this version reads"),
        ({"cases": [{"scenario": "plain"}], "schema": 1}, r"case 1: unknown field 'scenario' in a case of schema=1"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_the_file_and_what_to_do(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RegressionError, match=rf"^{re.escape(str(tmp_path))}/0006-dout-strides\.json: {message}"):
        stored_cases(write(tmp_path, **changes))


def test_the_text_of_a_case_error_is_passed_on(tmp_path: Path) -> None:
    case = {"attn_mask_type": "causal", "window_size": [-1, -1]}
    with pytest.raises(CaseError) as expected:
        Case.from_dict(case)
    with pytest.raises(RegressionError) as caught:
        stored_cases(write(tmp_path, cases=[case]))
    assert str(caught.value).endswith(f"0006-dout-strides.json: case 1: {expected.value}")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_needed_save_those_that_are_optional(key: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **{key: ...})
    if KEYS[key].optional:
        assert stored_cases(folder)
        return
    with pytest.raises(RegressionError, match=rf"\.json: {key} is missing; give {KEYS[key].takes}"):
        stored_cases(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'row': 6}", "\x00", "[" * 100_000, '{"row": ' + "9" * 5000 + "}", b"\xff\xfe", '{"a": 1, "a": 2}'],
)
def test_what_is_no_json_is_refused(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RegressionError, match=r"x\.json: not JSON: "):
        stored_cases(tmp_path)


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
def test_json_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RegressionError, match=r"x\.json: holds \w+; a file is a JSON object with schema, row"):
        stored_cases(tmp_path)


def test_a_key_given_twice_is_refused_in_a_case_too(tmp_path: Path) -> None:
    text = json.dumps(GOOD).replace('"transposed"', '"sliced", "output_grad": "transposed"')
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RegressionError, match=r"x\.json: not JSON: field 'output_grad' is given twice"):
        stored_cases(tmp_path)


def test_the_same_case_twice_is_refused_in_one_file_and_in_two(tmp_path: Path) -> None:
    folder = write(tmp_path, cases=[{"seed": 4}, {"seed": 4, "dtype": "bf16"}])
    with pytest.raises(RegressionError, match=r"\.json: 0006-dout-strides/2 is the same case as 0006-dout-strides/1 "):
        stored_cases(folder)
    write(tmp_path, cases=[{"seed": 4}])
    write(tmp_path, "0007-other", cases=[{"seed": 5}, {"seed": 4}])
    with pytest.raises(
        RegressionError, match=r"0007-other\.json: 0007-other/2 is the same case as 0006-dout-strides/1 "
    ):
        stored_cases(folder)


def test_a_folder_without_cases_is_refused_and_so_is_a_folder_for_a_file(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RegressionError, match=rf"^{re.escape(str(folder))} holds no stored cases; give a folder"):
            stored_cases(folder)
    (tmp_path / "x.json").mkdir()
    with pytest.raises(RegressionError, match=r"x\.json: cannot be read: "):
        stored_cases(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(tuple(KEYS)),
        json_values | st.lists(st.dictionaries(st.text(), json_values, max_size=2), max_size=2),
    )
)
@settings(max_examples=100, deadline=None)
def test_a_file_with_any_values_gives_cases_or_a_regression_error(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    folder = write(tmp_path_factory.getbasetemp() / "any values", **changes)
    try:
        found = stored_cases(folder)
    except RegressionError as error:
        message = str(error)
    else:
        message = "no error"
        assert all(isinstance(stored.case, Case) for stored in found)
    assert 0 < len(message) < 2000


# ------------------------------------------------------------------ the stored cases


def test_a_row_of_the_public_faults_has_a_file_or_a_reason_why_it_has_none() -> None:
    reasons = re.findall(r"^\| (\d+) \| (\S.*) \|$", (ROOT / "cases" / "README.md").read_text(), re.MULTILINE)
    told = [int(row) for row, _ in reasons]
    stored = {stored.row for stored in STORED if stored.row is not None}
    assert len(set(told)) == len(told)
    assert stored.isdisjoint(told)
    assert stored.union(told) == set(range(1, 43))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: str(path.stem))
def test_a_file_is_named_for_its_row_and_is_of_the_present_schema(path: Path) -> None:
    data = json.loads(path.read_text())
    number = re.match(r"\d{4}", path.name)
    assert data["row"] == (int(number[0]) if number else None)
    assert data["schema"] == SCHEMA
    assert len(data["fault"].split()) >= 8


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: str(path.stem))
def test_a_stored_case_says_only_what_differs_from_the_defaults(path: Path) -> None:
    default = Case().to_dict()
    for fields in json.loads(path.read_text())["cases"]:
        assert not {name for name, value in fields.items() if default[name] == value}


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: str(stored.name))
def test_a_stored_case_is_within_the_constraints_unless_its_file_says_that_it_is_refused(stored: StoredCase) -> None:
    assert (refusal(stored.case) is not None) == stored.refused


def test_the_stored_cases_hold_every_fp8_recipe_and_the_scenarios_that_their_faults_are_about() -> None:
    recipes = {stored.case.fp8_recipe for stored in STORED}
    scenarios = {stored.case.scenario for stored in STORED}
    assert recipes == {"none", "delayed", "current", "mxfp8", "hybrid"}
    assert {"checkpoint", "checkpoint_reentrant", "hooks_copy", "hooks_cpu", "offload", "offload_v1", "scale_changed",
            "environment_changed", "two_graphs", "alternating", "graph_capture"} <= scenarios  # fmt: skip
    assert scenarios <= set(SCENARIOS)


def gaps(side: Geometry) -> list[int]:
    """Return the unused rows after each sequence and before the next, not those past the last offset."""
    return [
        end - start - length for start, end, length in zip(side.offsets, side.offsets[1:], side.lengths, strict=False)
    ]


Drawn = Callable[[Geometry, Geometry], bool]


def gaps_after_each(q: Geometry, kv: Geometry) -> bool:
    return min(gaps(q) + gaps(kv)) > 0 and min(q.lengths + kv.lengths) > 0


def tail_only(q: Geometry, kv: Geometry) -> bool:
    return all(not any(gaps(side)[:-1]) and gaps(side)[-1] > 0 and min(side.lengths) > 0 for side in (q, kv))


def no_queries_and_no_keys(q: Geometry, kv: Geometry) -> bool:
    kinds = {(rows > 0, keys > 0) for rows, keys in zip(q.lengths, kv.lengths, strict=True)}
    return {(False, True), (True, False), (True, True)} <= kinds


def lengths_differ(q: Geometry, kv: Geometry) -> bool:
    shorter = min(q.lengths) < max(q.lengths) and min(kv.lengths) < max(kv.lengths)
    return shorter and all(rows != keys for rows, keys in zip(q.lengths, kv.lengths, strict=True))


def padded_to_8(q: Geometry, kv: Geometry) -> bool:
    return q.lengths == (5, 6) and q.offsets == (0, 8, 16)


DRAWN: dict[str, Drawn] = {
    "0014-padding-in-max-logit/1": gaps_after_each,
    "0014-padding-in-max-logit/2": gaps_after_each,
    "0015-tail-padding-unseen/1": lambda q, kv: q.lengths == kv.lengths == (14,) and q.offsets == kv.offsets == (0, 16),
    "0015-tail-padding-unseen/2": tail_only,
    "0016-workspace-not-cleared/1": gaps_after_each,
    "0017-rows-past-the-last-sequence/1": lambda q, kv: all(side.rows - side.offsets[-1] == 5 for side in (q, kv)),
    "0030-empty-sequences/1": no_queries_and_no_keys,
    "0030-empty-sequences/2": no_queries_and_no_keys,
    "0032-diagonal-of-padded-sequences/1": lengths_differ,
    "0032-diagonal-of-padded-sequences/2": lengths_differ,
    "0032-diagonal-of-padded-sequences/3": lengths_differ,
    "0032-diagonal-of-padded-sequences/4": lengths_differ,
    "0034-padded-offsets/1": padded_to_8,
    "0034-padded-offsets-in-fp8/1": padded_to_8,
    "0035-one-packed-sequence/1": lambda q, kv: q.lengths == kv.lengths == (64,) and q.rows == kv.rows == 64,
}
"""What the seed of a stored case draws, where its fault is about where the sequences lie."""


@pytest.mark.parametrize("name", DRAWN)
def test_a_seed_draws_the_sequences_that_the_fault_is_about(name: str) -> None:
    case = BY_NAME[name].case
    drawn = geometry(case)
    assert DRAWN[name](*drawn)
    others = [geometry(case.replace(seed=seed)) for seed in range(30)]
    assert not all(DRAWN[name](*other) for other in others), "any seed would do, so the row shows nothing"


def test_what_a_case_with_gaps_draws_is_in_the_table() -> None:
    assert {stored.name for stored in STORED if stored.case.pad_between_seqs} <= set(DRAWN)


def test_the_gradient_of_row_39_has_the_same_values_however_it_lies() -> None:
    found: dict[str, list[torch.Tensor]] = {}
    for stored in STORED:
        if stored.row == 39:
            found.setdefault(stored.case.qkv_layout, []).append(build(stored.case).fresh().output_grad)
    assert len(found) == 2
    for first, *rest in found.values():
        assert len({tensor.stride() for tensor in (first, *rest)}) == 3
        assert all(torch.equal(first, other) for other in rest)


def test_the_sizes_of_row_21_are_pairwise_different() -> None:
    for stored in STORED:
        if stored.row == 21:
            case = stored.case
            sizes = [case.batch_size, case.num_heads, case.max_seqlen_q, case.head_dim_qk]
            assert len(set(sizes)) == len(sizes)


# ------------------------------------------------------------------ running them


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(resolve("legacy"), resolve("refactored"), get_engine("reference"))


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: str(stored.name))
def test_legacy_and_refactored_agree_on_every_stored_case(stored: StoredCase, pair: Pair) -> None:
    result = pair.run(stored.case)
    if stored.refused:
        assert (result.outcome, result.reason) == ("unsupported", refusal(stored.case))
    elif stored.case.scenario == "graph_capture" and pair.engine.device.type == "cpu":
        assert result.outcome == "unsupported"
        assert "CUDA" in str(result.reason)
    else:
        assert result.outcome == "match", f"{result.reason} {result.differences}"
        assert not result.both_raised, result.reason


FORWARD_DONE = '    nvtx_range_pop("transformer_engine.FusedAttnFunc.forward")\n'
RESULT = "_fused_attn_backward_impl(bwd_args), None)"
CONTIGUOUS = "        d_out = d_out.contiguous()\n"
WINDOW = "window_size=bwd_args.window_size"
PLANTED: dict[int, tuple[str, str, str]] = {
    1: ('slots.get("aux_bias")', 'slots["aux_bias"].clone() if "aux_bias" in slots else None', "saved/"),
    2: (RESULT, RESULT.replace("None)", "None, None)"), "backward/results beyond the inputs"),
    3: ("self.softmax_stats, self.rng_state, *", "self.softmax_stats, torch.zeros_like(self.rng_state), *", "grad/"),
    4: ('_reload_qkv_layout(ctx_attrs["qkv_layout"])', 'ctx_attrs["qkv_layout"]', "grad/"),
    5: ('"k": fwd_args.k,',
        '"k": fwd_args.q if fwd_args.q.untyped_storage().data_ptr() == fwd_args.k.untyped_storage().data_ptr() '
        "else fwd_args.k,", "grad/"),
    6: (CONTIGUOUS, "        pass\n", "grad/"),
    7: ("is_bwd_fp8 = args.fp8 and bool(", "is_bwd_fp8 = bool(", "call/fused_attn_bwd/0/"),
    9: ("mark_activation_offload(q_fp8, k_fp8, v_fp8, out_fp8)", "(q_fp8, k_fp8, v_fp8).append(out_fp8)", "exception/"),
    10: ("S_quantizer.scale.clone()", "S_quantizer.scale", "call/fused_attn_bwd/0/s_quantizer/scale"),
    12: (FORWARD_DONE, f"    if args.fp8:\n        S_quantizer.amax = S_quantizer.amax.clone()\n{FORWARD_DONE}",
         "quantizer"),
    13: ("bwd_args.dO_quantizer(d_out)", "(bwd_args.dO_quantizer(d_out), bwd_args.dO_quantizer.amax.zero_())[0]",
         "quantizer"),
    15: ("cu_seqlens_kv_padded=bwd_args.cu_seqlens_kv_padded", "cu_seqlens_kv_padded=bwd_args.cu_seqlens_kv",
         "call/fused_attn_bwd/0/cu_seqlens_kv_padded"),
    21: ("max_seqlen_q=bwd_args.max_seqlen_q", "max_seqlen_q=bwd_args.max_seqlen_kv", "call/fused_attn_bwd/"),
    22: ("    d_bias = rest[0]", "    dq = None\n    d_bias = rest[0]", "grad/q"),
    23: (FORWARD_DONE,
         "    if args.fp8 and not args.is_training:\n        QKV_quantizer.set_usage(rowwise=False)\n" + FORWARD_DONE,
         "quantizer"),
    24: (RESULT, RESULT.replace(" None)", ")"), "exception/"),
    26: ("d_bias = rest[0] if", "d_bias = rest[0][:1] if", "grad/attn_bias"),
    27: ("d_bias = rest[0] if _has_bias(bwd_args.attn_bias_type)",
         "d_bias = rest[0] if bwd_args.aux_bias.requires_grad",
         "grad/attn_bias"),
    30: ("cu_seqlens_kv=bwd_args.cu_seqlens_kv,", "cu_seqlens_kv=bwd_args.cu_seqlens_q,", "grad/"),
    31: (WINDOW, "window_size=(max(-1, bwd_args.window_size[0] - 1), bwd_args.window_size[1])", "grad/"),
    32: ("bottom_right_diagonal=bwd_args.bottom_right_diagonal", "bottom_right_diagonal=None", "grad/"),
    33: (WINDOW, "window_size=(-1, 0)", "grad/"),
    34: ("cu_seqlens_q_padded=bwd_args.cu_seqlens_q_padded", "cu_seqlens_q_padded=bwd_args.cu_seqlens_q", "grad/"),
    38: ("        start_offload(q, k, v, offload_base_tensor=True)\n", "        pass\n", "calls/sequence"),
    39: (CONTIGUOUS, "        pass\n", "grad/"),
}  # fmt: skip
"""Faults of the rows' own kinds that can be planted in a source: text, what it becomes, where that must be seen.

The other rows are about what the kernels and helpers do, which control and candidate share.
"""


@pytest.mark.parametrize("row", PLANTED)
def test_a_fault_of_the_kind_is_seen_in_the_stored_cases_of_its_row(row: int) -> None:
    text = resolve("refactored").text
    old, new, path = PLANTED[row]
    assert text.count(old) == 1
    planted = Pair(
        resolve("refactored"), Source("planted", "planted.py", text.replace(old, new)), get_engine("reference")
    )
    results = [planted.run(stored.case) for stored in STORED if stored.row == row and not stored.refused]
    assert not [result.reason for result in results if result.outcome == "error"]
    seen = {difference.path for result in results for difference in result.differences}
    assert any(name.startswith(path) for name in seen), sorted(seen)


# ------------------------------------------------------------------ where they are found

NAMES = [stored.name + stored.case.id for stored in STORED]
SHOW = """
import sys, harness.regressions
print(harness.regressions.FOLDER, *(stored.name + stored.case.id for stored in harness.regressions.stored_cases()))
assert "torch" not in sys.modules
"""


def names_seen_from(folder: Path, *, path: Path | None = None) -> list[str]:
    """Return what a fresh interpreter finds that starts in another folder, without torch."""
    code = (f"import sys; sys.path.insert(0, {str(path)!r})" if path else "") + SHOW
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_stored_cases_are_found_from_any_folder_and_without_torch(tmp_path: Path) -> None:
    (tmp_path / "cases" / "regressions").mkdir(parents=True)  # of somebody else: not ours to read
    assert names_seen_from(tmp_path) == [str(FOLDER), *NAMES]


def test_a_wheel_carries_the_stored_cases(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    tree, wheels, installed = (tmp_path / name for name in ("tree", "wheels", "installed"))
    for name in ("harness", "legacy_impl", "refactored_impl", "cases"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(wheels)!r})"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, check=True)
    (wheel,) = wheels.glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")
    shutil.rmtree(tree)
    assert names_seen_from(tmp_path, path=installed) == [str(installed / "cases" / "regressions"), *NAMES]
