"""A worker without torch that speaks the agent's frames by itself, for the agent's tests.

argv: a directory for its notes, then JSON {"steps": n, "do": {"<rank>/<incarnation>@<step>": action}, "gate": bool}.
Step -1 is set-up. With a gate it does not finish before the file ``gate`` exists in the directory.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

notes = Path(sys.argv[1])
plan = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
sock = None
rank = incarnation = None


def note(what, **fields):
    line = {"what": what, "rank": rank, "incarnation": incarnation, "pid": os.getpid(), "t": time.time(), **fields}
    with (notes / "notes.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def send(head, blob=b""):
    text = json.dumps(head).encode()
    sock.sendall(struct.pack("!II", len(text), len(blob)) + text + blob)


def exactly(count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            note("link closed")
            sys.exit(70)
        data += part
    return data


def receive(timeout_s=None):
    if timeout_s is not None and not select.select([sock], [], [], timeout_s)[0]:
        return None, b""
    head, blob = struct.unpack("!II", exactly(8))
    return json.loads(exactly(head)), exactly(blob)


def until(kind):
    while True:
        head, blob = receive()
        if head["type"] == kind:
            return head, blob


def act(action, step):
    note("act", action=action, step=step)
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            trace = f"Traceback (most recent call last): attempt {incarnation}\nZeroDivisionError: x"
            where = step if step >= 0 else None
            send({"type": "raised", "step": where, "kind": "ZeroDivisionError", "message": "x", "traceback": trace})
            sys.exit(1)
        case "exit":
            sys.exit(3)
        case "leave":
            sys.exit(0)
        case "suspect":
            send({"type": "suspect", "generation": world["generation"], "why": "reset by peer"})
        case "fork":
            if os.fork() == 0:
                note("forked")
                time.sleep(300)
            os.kill(os.getpid(), signal.SIGKILL)
        case "busy":
            until_t = time.monotonic() + 1.2
            while time.monotonic() < until_t:
                pass
        case "stuck":
            while True:
                send({"type": "heartbeat", "step": step, "ops": 1, "waiting": False})
                time.sleep(0.05)
        case "hang":
            sock.close()
            time.sleep(300)


role = os.environ["REGROW_ROLE"]
note("start", role=role, env={k: v for k, v in os.environ.items() if k in ("RANK", "LOCAL_RANK", "WORLD_SIZE")})
if role == "spare":
    time.sleep(plan.get("slow_spare", 0))
if role == "spare" and plan.get("bad_spare"):
    sys.exit("KeyError: 'RANK'")
if plan.get("no_init"):
    sys.exit(int(plan.get("exit", 0)))
if plan.get("ignore_sigterm"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sock = socket.socket(socket.AF_UNIX)
sock.connect(os.environ["REGROW_AGENT"])
token = os.environ["REGROW_TOKEN"]
send({"type": "hello", "token": token, "role": role, "pid": os.getpid(), "rank": None, "incarnation": 0})
assign, record = until("assign")
rank, incarnation = assign["rank"], assign["incarnation"]
for path, fd in ((assign["stdout"], 1), (assign["stderr"], 2)):
    if path is not None:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
print(f"hello from rank {rank} incarnation {incarnation}", flush=True)
note("assign", role=role, assign=assign, record=record.decode())
actions = plan.get("do", {})
world, _ = until("world")
if (action := actions.get(f"{rank}/{incarnation}@-1")) is not None:
    act(action, -1)
send({"type": "setup_done", "step": 0}, f"record of {rank}/{incarnation}".encode())
send({"type": "event", "event": "joined", "generation": world["generation"], "t": time.time()})
step, resumed, finished = 0, None if assign["replacement"] else world["generation"], None
fence = Path(os.environ["REGROW_AGENT"]).with_name("fence")
while not world["all_finished"]:
    head, _ = receive(0.01)
    if time.monotonic() >= struct.unpack("d", fence.read_bytes()[:8])[0]:
        os._exit(1)
    while head is not None:
        if head["type"] == "world":
            world = head
            note("world", world=world)
        head, _ = receive(0)
    send({"type": "heartbeat", "step": step, "ops": step, "waiting": world["phase"] == "SETUP"})
    if world["phase"] != "TRAINING":
        continue
    if resumed != world["generation"]:
        resumed = world["generation"]
        send({"type": "resumed", "generation": resumed, "step": step})
        note("resumed", generation=resumed)
    if (action := actions.pop(f"{rank}/{incarnation}@{step}", None)) is not None:
        act(action, step)
    if step < plan.get("steps", 5):
        step += 1
        if step == plan.get("steps", 5):
            note("steps done")
    elif finished != world["generation"] and (not plan.get("gate") or (notes / "gate").exists()):
        finished = world["generation"]
        send({"type": "finished", "generation": finished, "step": step})
note("end")
if (action := actions.get(f"{rank}/{incarnation}@end")) is not None:
    act(action, step)
