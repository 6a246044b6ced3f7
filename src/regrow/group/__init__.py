"""The healing process group: a torch.distributed backend that is aborted and reconnected in place."""

from regrow.group.activity import Activity, Idle
from regrow.group.fabric import Fabric, Mode
from regrow.group.healing import MESSAGES, HealingGroup
from regrow.group.record import Recorder, outputs_of
from regrow.group.sockets import outgoing
from regrow.group.work import RecordedWork, ReplayedWork

__all__ = [
    "MESSAGES",
    "Activity",
    "Fabric",
    "HealingGroup",
    "Idle",
    "Mode",
    "RecordedWork",
    "Recorder",
    "ReplayedWork",
    "outgoing",
    "outputs_of",
]
