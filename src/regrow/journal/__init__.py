"""What a rank has sent, kept until nobody can need it again: records, where they lie, and how others get them."""

from regrow.journal.log import Journal
from regrow.journal.record import Channel, Damaged, Record
from regrow.journal.segments import Pin
from regrow.journal.serve import Fetcher, Messages, Server

__all__ = ["Channel", "Damaged", "Fetcher", "Journal", "Messages", "Pin", "Record", "Server"]
