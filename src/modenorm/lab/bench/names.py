"""Names of norms on the benchmarks' command lines, such as bn, mn2, mgn2, gn2."""

__all__ = ["split_name"]


def split_name(name: str) -> tuple[str, int]:
    """The norm and its number of modes or groups, 1 where none is given.

    >>> split_name("mn8"), split_name("bn")
    (('mn', 8), ('bn', 1))
    """
    kind = name.rstrip("0123456789")
    return kind, int(name[len(kind) :] or 1)
