"""How methods are called in tables: by the paper's names, and by whose iteration they take."""


def iteration(solver: str) -> str | None:
    """Whose conjugate gradients a solver takes; None where there is nothing to iterate.

    >>> [iteration(solver) for solver in ("backprop", "exact", "cg:3", "published:3")]
    [None, None, 'correct', 'published']
    """
    return {"cg": "correct", "published": "published"}.get(solver.partition(":")[0])


def method(solver: str) -> str:
    """The method's name in the paper; both iterations are the same method to it.

    >>> [method(solver) for solver in ("backprop", "exact", "cg:3", "published:3")]
    ['BackProp', 'ProxProp (exact)', 'ProxProp (cg3)', 'ProxProp (cg3)']
    """
    family, _, steps = solver.partition(":")
    if family == "backprop":
        return "BackProp"
    return f"ProxProp (cg{steps})" if steps else f"ProxProp ({family})"
