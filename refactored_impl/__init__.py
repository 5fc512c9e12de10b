"""Hold FusedAttnFunc as a thin wrapper over two argument bags and helpers that need no autograd.

Reading this package imports nothing; its names are loaded on first use and need TransformerEngine then.
"""

__all__ = ["FusedAttnBwdArgs", "FusedAttnFunc", "FusedAttnFwdArgs"]


def __getattr__(name):
    if name in __all__:
        from refactored_impl import backends

        return getattr(backends, name)
    raise AttributeError(f"module 'refactored_impl' has no attribute {name!r}")
