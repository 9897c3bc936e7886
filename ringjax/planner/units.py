"""Figures for people."""


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:,.2f} MiB"


def seconds(value: float) -> str:
    """Seconds for people."""
    for unit, scale in (("s", 1), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def short(value: float) -> str:
    """Counts for people."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"
