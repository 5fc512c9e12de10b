"""What the reference engine raises when it is asked for something it does not model."""

from __future__ import annotations


class EngineUnsupported(NotImplementedError):
    """The reference engine does not model what was asked for; the message says what, and which value asked for it.

    It says nothing about the subject that made the call: real kernels may well support it.
    """
