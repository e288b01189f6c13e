"""Parameter lists for the tests of resharding."""

from verl.weights.shards import Parameter


def even(layers: int, width: int = 16) -> tuple[Parameter, ...]:
    """Every parameter is cut by tensor parallelism, half of the bytes along each dimension."""
    return tuple(
        Parameter(f"layers.{i}.{name}", shape, cut, (i,))
        for i in range(layers)
        for name, shape, cut in (("up", (4 * width, width), 0), ("down", (width, 4 * width), 1))
    )


def rows(layers: int, width: int = 16) -> tuple[Parameter, ...]:
    """Every parameter is cut along dimension 0."""
    return tuple(Parameter(f"layers.{i}.up", (4 * width, width), 0, (i,)) for i in range(layers))


def tiny_model(layers: int = 4) -> tuple[Parameter, ...]:
    """Sizes that do not divide, a tied embedding, norms that are not cut, a scalar."""
    out = [Parameter("embed", (37, 12), 0, (0, layers - 1)), Parameter("scale", (), None, ())]
    for i in range(layers):
        out += [
            Parameter(f"layers.{i}.norm", (12,), None, (i,)),
            Parameter(f"layers.{i}.qkv", (20, 12), 0, (i,)),
            Parameter(f"layers.{i}.out", (12, 10), 1, (i,)),
        ]
    return (*out, Parameter("norm", (12,), None, (layers - 1,)))
