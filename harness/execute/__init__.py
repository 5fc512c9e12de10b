"""Running cases and writing down what came of each."""

from __future__ import annotations
