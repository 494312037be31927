"""The least time that work can take on a device: bytes at its read rate, arithmetic at its matrix rate.

Each matrix product and each layer's attention is one piece of work, bound by the slower of the two; a phase
is their sum, because one follows from the other. Counted are weights and cached keys and values, once for
each time they are needed; activations are not (they fit into a GPU's L2 cache), nor are launches.

Legend: T rows, D hidden size, B requests, R rows a request.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do, measured in the same process."""

    read_bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """Something that is read and computed once."""

    num_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The longer of reading and computing."""
        return max(self.num_bytes / ceilings.read_bytes_per_second, self.flops / ceilings.flops_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One decoder layer."""

    input_size: int
    """Width that q, k and v read: 2 D in a head's first layer."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


def matrix(rows: float, num_out: int, num_in: int, itemsize: int) -> Work:
    """A product of `rows` rows with a weight [num_out, num_in]."""
    return Work(num_out * num_in * itemsize, 2.0 * rows * num_out * num_in)


def attention(num_requests: int, rows: float, context: int, shape: LayerShape, itemsize: int) -> Work:
    """`rows` rows a request over `context` cached tokens of one layer: K and V are read once a request."""
    num_bytes = num_requests * context * 2 * shape.num_kv_heads * shape.head_dim * itemsize
    return Work(num_bytes, 4.0 * num_requests * rows * context * shape.num_heads * shape.head_dim)


def layer(num_requests: int, rows: float, context: int, shape: LayerShape, itemsize: int) -> list[Work]:
    """One layer's matrices and its attention, for `rows` rows of each request.

    Example, one row of one request, llama-3.1-8b without context: 218 M weights in bfloat16 = 436 MB.
    """
    size, total = shape.hidden_size, num_requests * rows
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [
        matrix(total, q_size + 2 * kv_size, shape.input_size, itemsize),
        attention(num_requests, rows, context, shape, itemsize),
        matrix(total, size, q_size, itemsize),
        matrix(total, 2 * shape.intermediate_size, size, itemsize),
        matrix(total, size, shape.intermediate_size, itemsize),
    ]


def floor_ms(work: Iterable[Work], ceilings: Ceilings) -> float:
    """Milliseconds that pieces of work take one after another."""
    return 1e3 * sum(piece.seconds(ceilings) for piece in work)
