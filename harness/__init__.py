"""Show that a change to TransformerEngine's FusedAttnFunc is behaviour-neutral, or where it is not."""

from __future__ import annotations

__version__ = "0.1.0"
