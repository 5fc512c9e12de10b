"""Hold FusedAttnFunc with its arguments passed one by one: 36 positional values after ``ctx``.

Reading this package imports nothing; ``FusedAttnFunc`` is loaded on first use and needs TransformerEngine then.
"""

__all__ = ["FusedAttnFunc"]


def __getattr__(name):
    if name in __all__:
        from legacy_impl import backends

        return getattr(backends, name)
    raise AttributeError(f"module 'legacy_impl' has no attribute {name!r}")
