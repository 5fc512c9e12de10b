"""The table of layouts says what TransformerEngine's qkv_layout strings say."""

from __future__ import annotations

import dataclasses

import pytest

from harness.layouts import LAYOUTS

# name: (format of q, format of kv, packing, buffers, paged), each written out by hand
EXPECTED = {
    "sb3hd": ("sbhd", "sbhd", "3hd", 1, False),
    "sbh3d": ("sbhd", "sbhd", "h3d", 1, False),
    "bs3hd": ("bshd", "bshd", "3hd", 1, False),
    "bsh3d": ("bshd", "bshd", "h3d", 1, False),
    "t3hd": ("thd", "thd", "3hd", 1, False),
    "th3d": ("thd", "thd", "h3d", 1, False),
    "sbhd_sb2hd": ("sbhd", "sbhd", "2hd", 2, False),
    "sbhd_sbh2d": ("sbhd", "sbhd", "h2d", 2, False),
    "bshd_bs2hd": ("bshd", "bshd", "2hd", 2, False),
    "bshd_bsh2d": ("bshd", "bshd", "h2d", 2, False),
    "thd_t2hd": ("thd", "thd", "2hd", 2, False),
    "thd_th2d": ("thd", "thd", "h2d", 2, False),
    "sbhd_sbhd_sbhd": ("sbhd", "sbhd", None, 3, False),
    "bshd_bshd_bshd": ("bshd", "bshd", None, 3, False),
    "thd_thd_thd": ("thd", "thd", None, 3, False),
    "sbhd_bshd_bshd": ("sbhd", "bshd", None, 3, False),
    "bshd_sbhd_sbhd": ("bshd", "sbhd", None, 3, False),
    "thd_bshd_bshd": ("thd", "bshd", None, 3, False),
    "thd_sbhd_sbhd": ("thd", "sbhd", None, 3, False),
    "paged_kv_bshd_bshd_bshd": ("bshd", "bshd", None, 3, True),
    "paged_kv_bshd_sbhd_sbhd": ("bshd", "sbhd", None, 3, True),
    "paged_kv_sbhd_bshd_bshd": ("sbhd", "bshd", None, 3, True),
    "paged_kv_sbhd_sbhd_sbhd": ("sbhd", "sbhd", None, 3, True),
    "paged_kv_thd_bshd_bshd": ("thd", "bshd", None, 3, True),
    "paged_kv_thd_sbhd_sbhd": ("thd", "sbhd", None, 3, True),
}


def test_the_table_has_the_25_layouts_of_the_wrapper_and_no_other() -> None:
    assert set(LAYOUTS) == set(EXPECTED)
    assert len(LAYOUTS) == 25
    assert "bhsd_bhsd_bhsd" not in LAYOUTS  # a result of MXFP8 quantization, never an input


@pytest.mark.parametrize("name", EXPECTED)
def test_a_layout_says_formats_packing_buffers_and_paging(name: str) -> None:
    layout = LAYOUTS[name]
    assert (layout.q_format, layout.kv_format, layout.packing, layout.parts, layout.paged) == EXPECTED[name]
    assert layout.name == name
    assert layout.thd == ("thd" in EXPECTED[name][:2])


def test_a_row_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYOUTS["sbh3d"].paged = True  # type: ignore[misc]
