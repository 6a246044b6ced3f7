"""Messages from rank to rank over sockets of their own: who sends to whom, at which generation; the streams below."""

from regrow.courier.courier import Address, Courier
from regrow.courier.stream import memory_of

__all__ = ["Address", "Courier", "memory_of"]
