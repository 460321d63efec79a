"""A client's end of the wire: what the server's messages say, applied to what the client holds."""

from typing import Any

import torch
from torch import Tensor

from fedsieve.federate.transport import Transport
from fedsieve.sieve.mask import Mask, unpacked
from fedsieve.wire import Extent, Message, Vector, WireError, decode


class Receiver:
    """Reads messages in the order in which they were sent; `transport` is the client's own."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def mask(self, data: Any) -> Mask:
        """The mask in a message, or drawn from the seed that it holds."""
        masks = self.transport.masks
        if masks is None:
            raise WireError("the message holds a mask, and this phase has none")
        bits = self._vector(self._read(data, "mask"), "mask").bits
        if bits is None:
            raise WireError("the message holds no mask")
        return Mask(masks.shapes, bits.clone())

    def share(self, mask: Mask) -> None:
        """Later messages may refer to the mask that all clients share."""
        assert self.transport.masks is not None
        self.transport.masks.share(mask)

    def extra(self, name: str, data: Any) -> Tensor:
        """One of the broadcast extras; what a mask leaves out is 0."""
        vector = self._vector(self._read(data, "scores"), name)
        extent = self.transport.layout.vectors[name]
        return _onto(torch.zeros(extent.size, dtype=vector.values.dtype), vector, extent)

    def start(self, data: Any, weights: Tensor) -> Tensor:
        """The weights in scope at the phase's start, from a message and the current ones."""
        vector = self._vector(self._read(data, "broadcast"), "start")
        return _onto(weights.clone(), vector, self.transport.layout.vectors["start"])

    def weights(self, data: Any, vector: Tensor) -> tuple[Tensor, int]:
        """All of the model's weights after a broadcast, and their version; `vector` are those before."""
        message, transport = self._read(data, "broadcast"), self.transport
        version = message.numbers.get("version", -1.0)
        if not version.is_integer() or version < 0:
            raise WireError("the message does not say which version of the weights it brings")
        after, extents = vector.clone(), transport.layout.vectors
        found = self._vector(message, "weights")
        transport.scope.put(after, _onto(transport.scope.of(vector).clone(), found, extents["weights"]))
        if "rest" in message.vectors:
            before = torch.cat([vector[start:stop] for start, stop in transport.rest])
            changed, position = _onto(before, message.vectors["rest"], extents["rest"]), 0
            for start, stop in transport.rest:
                after[start:stop] = changed[position : position + stop - start]
                position += stop - start
        return after, int(version)

    def _read(self, data: Any, kind: str) -> Message:
        return decode(data, self.transport.layout, kind, self.transport.known(), self.transport.redraw)

    def _vector(self, message: Message, name: str) -> Vector:
        if name not in message.vectors:
            raise WireError(f"the message has no vector {name}")
        return message.vectors[name]


def _onto(base: Tensor, vector: Vector, extent: Extent) -> Tensor:
    """`base` with a vector's values at their positions."""
    if vector.bits is None:
        return vector.values.to(base.device, base.dtype, copy=True)
    tail = torch.ones(extent.tail, dtype=torch.bool)
    where = torch.cat((unpacked(vector.bits, extent.weights), tail))
    base[where.to(base.device)] = vector.values.to(base.device, base.dtype)
    return base
