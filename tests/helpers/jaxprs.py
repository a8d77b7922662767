"""What the tests ask of traced programs."""

import jax


def equations_in(jaxpr):
    """All equations, also those within equations."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations_in(inner)


def shapes_in(jaxpr):
    """The shapes of all inputs and outputs of equations, also of those within equations."""
    for equation in equations_in(jaxpr):
        for variable in (*equation.invars, *equation.outvars):
            yield tuple(getattr(variable.aval, "shape", ()))
