"""One rank of two that replays CUDA graphs with calls of NCCL in them, and looks at every result. The other half is
tests/gpu/nccl_graphs.py, which takes the communicators away underneath.

Usage: nccl_graphs_rank.py FOLDER [KIND ...]. Ends when FOLDER/stop holds the number of a step that is still to come.
"""

import ctypes
import faulthandler
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from cuda.bindings import driver as dr

faulthandler.enable()
faulthandler.dump_traceback_later(int(os.environ.get("PATIENCE", "34")), exit=True)
RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[1])
COUNT, FLOAT, SUM = 1 << 16, 7, 0


def ok(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]


class Uid(ctypes.Structure):
    _fields_ = (("b", ctypes.c_byte * 128),)


class Raw:
    """A communicator by ctypes, as a program uses it that has no torch."""

    library = None

    def __init__(self, name):
        n = self.library = Raw.library = Raw.library or ctypes.CDLL("libnccl.so.2")
        n.ncclAllReduce.argtypes = (
            [ctypes.c_void_p] * 2 + [ctypes.c_size_t, ctypes.c_int, ctypes.c_int] + [ctypes.c_void_p] * 2
        )
        n.ncclSend.argtypes = n.ncclRecv.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        n.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Uid, ctypes.c_int]
        n.ncclCommDestroy.argtypes = [ctypes.c_void_p]
        uid, store = Uid(), dist.distributed_c10d._get_default_store()
        if RANK == 0:
            self.nccl(n.ncclGetUniqueId(ctypes.byref(uid)))
            store.set(f"uid-{name}", bytes(uid))
        else:
            ctypes.memmove(ctypes.byref(uid), store.get(f"uid-{name}"), 128)
        self.comm = ctypes.c_void_p()
        self.nccl(n.ncclCommInitRank(ctypes.byref(self.comm), 2, uid, RANK))

    def nccl(self, answer):
        assert answer == 0, f"NCCL answered {answer}"

    def sum(self, tensor, stream, count=COUNT):
        at = tensor.data_ptr()
        self.nccl(self.library.ncclAllReduce(at, at, count, FLOAT, SUM, self.comm, int(stream)))

    def exchange(self, out, into, stream):
        n, other = self.library, 1 - RANK
        self.nccl(n.ncclGroupStart())
        self.nccl(n.ncclSend(out.data_ptr(), COUNT, FLOAT, other, self.comm, int(stream)))
        self.nccl(n.ncclRecv(into.data_ptr(), COUNT, FLOAT, other, self.comm, int(stream)))
        self.nccl(n.ncclGroupEnd())


class Kind:
    """A graph: `build` makes it, `replay(i)` launches it and says what is wrong; empty is right."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.s = dr.CUstream(self.stream.cuda_stream)
        self.x, self.y, self.z = (torch.zeros(COUNT, device="cuda") for _ in range(3))
        self.again = 0

    def name(self):
        return type(self).__name__.lower()

    def put(self, i):
        self.x.fill_((RANK + 1) * i)

    def check(self, i):
        return self.same(self.z, 3 * i)

    def same(self, tensor, value):
        found = (tensor.min().item(), tensor.max().item())
        return "" if found == (value, value) else f"{found} instead of {value}"

    def replay(self, i):
        self.put(i)
        torch.cuda.synchronize()
        self.launch()
        self.stream.synchronize()
        return self.check(i)


# ---- with torch


class Plain(Kind):
    """A torch graph with one all-reduce, captured in torch's own mode."""

    mode = "global"

    def body(self):
        self.y.copy_(self.x)
        dist.all_reduce(self.y)
        self.z.copy_(self.y)

    def build(self):
        with torch.cuda.stream(self.stream):
            self.body()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode=self.mode):
            self.body()

    def launch(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()


class Several(Plain):
    """Several calls of two communicators, a group, and kernels between them."""

    mode = "thread_local"

    def body(self):
        self.y.copy_(self.x)
        for turn in range(3):
            dist.all_reduce(self.y, group=WORLD2 if turn == 1 else None)
            self.y.div_(2)
        parts = self.w = getattr(self, "w", None) or [torch.zeros(COUNT, device="cuda") for _ in range(2)]
        dist.all_gather(parts, self.y)
        got = self.v = self.v if hasattr(self, "v") else torch.zeros(COUNT, device="cuda")
        ops = [dist.P2POp(dist.isend, self.x, 1 - RANK), dist.P2POp(dist.irecv, got, 1 - RANK)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        self.z.copy_(parts[0] + parts[1] + got)

    def check(self, i):
        return self.same(self.z, 3 * i + (2 - RANK) * i)

    def put(self, i):
        self.x.fill_((RANK + 1) * i)


class Training(Plain):
    """A training step: forward, backward, the gradients' all-reduce and the optimizer, all in one graph."""

    mode = "thread_local"

    def body(self):
        self.loss = (self.model(self.batch) - self.batch).pow(2).mean()
        self.loss.backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def build(self):
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).cuda()
        self.batch = torch.zeros(16, 64, device="cuda")
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, capturable=True)
        self.other = None
        super().build()

    def put(self, i):
        self.batch.fill_(0.01 * (i % 7 + RANK))

    def check(self, i):
        whole = torch.stack([p.detach().double().sum() for p in self.model.parameters()]).sum().item()
        key, store = f"training-{i}", dist.distributed_c10d._get_default_store()
        store.set(f"{key}-{RANK}", repr(whole))
        other = store.get(f"{key}-{1 - RANK}").decode()
        return "" if other == repr(whole) and whole == whole else f"weights {whole}, the other rank's {other}"


# ---- with the driver's own functions


class Driver(Kind):
    """Captured with the driver's functions and raw calls: copy, all-reduce, copy."""

    def copy(self, to, source, stream=None):
        ok(dr.cuMemcpyDtoDAsync(to.data_ptr(), source.data_ptr(), 4 * COUNT, stream or self.s))

    def capture(self, body):
        ok(dr.cuStreamBeginCapture(self.s, dr.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
        try:
            body()
        except Exception:
            dr.cuStreamEndCapture(self.s)  # a stream that goes on capturing disturbs all others
            raise
        return ok(dr.cuStreamEndCapture(self.s))

    def body(self):
        self.copy(self.y, self.x)
        RAW.sum(self.y, self.s)
        self.copy(self.z, self.y)

    def build(self):
        self.graph = self.capture(self.body)
        self.make(self.graph)

    def make(self, graph, flags=0):
        self.exec = ok(dr.cuGraphInstantiate(graph, flags))

    def launch(self):
        ok(dr.cuGraphLaunch(self.exec, self.s))


class Destroyed(Driver):
    """The graph is destroyed as soon as the executable is there."""

    def build(self):
        super().build()
        ok(dr.cuGraphDestroy(self.graph))


class Streams(Driver):
    """Two streams that fork and join, two communicators, an exchange between the ranks."""

    def build(self):
        self.second, self.got = torch.cuda.Stream(), torch.zeros(COUNT, device="cuda")
        self.events = [ok(dr.cuEventCreate(2)) for _ in range(2)]
        super().build()

    def body(self):
        other = dr.CUstream(self.second.cuda_stream)
        self.copy(self.y, self.x)
        ok(dr.cuEventRecord(self.events[0], self.s))
        ok(dr.cuStreamWaitEvent(other, self.events[0], 0))
        RAW.sum(self.y, self.s)
        RAW2.exchange(self.x, self.got, other)
        ok(dr.cuEventRecord(self.events[1], other))
        ok(dr.cuStreamWaitEvent(self.s, self.events[1], 0))
        RAW.sum(self.y, self.s)
        self.copy(self.z, self.y)

    def check(self, i):
        return self.same(self.z, 6 * i) or self.same(self.got, (2 - RANK) * i)


class Memory(Driver):
    """With nodes that allocate and free memory: such a graph can neither be cloned nor be instantiated twice."""

    def body(self):
        at = ok(dr.cuMemAllocAsync(4 * COUNT, self.s))
        ok(dr.cuMemcpyDtoDAsync(at, self.x.data_ptr(), 4 * COUNT, self.s))
        ok(dr.cuMemcpyDtoDAsync(self.y.data_ptr(), at, 4 * COUNT, self.s))
        RAW.sum(self.y, self.s)
        ok(dr.cuMemFreeAsync(at, self.s))
        self.copy(self.z, self.y)

    def build(self):
        super().build()
        ok(dr.cuGraphDestroy(self.graph))


class Child(Driver):
    """The all-reduce is in a child graph, whose original is destroyed."""

    def build(self):
        child = self.capture(lambda: RAW.sum(self.y, self.s))
        before, after = (self.capture(lambda p=pair: self.copy(*p)) for pair in ((self.y, self.x), (self.z, self.y)))
        self.graph = ok(dr.cuGraphCreate(0))
        first = ok(dr.cuGraphAddChildGraphNode(self.graph, None, 0, before))
        middle = ok(dr.cuGraphAddChildGraphNode(self.graph, [first], 1, child))
        ok(dr.cuGraphAddChildGraphNode(self.graph, [middle], 1, after))
        for one in (child, before, after):
            ok(dr.cuGraphDestroy(one))
        self.make(self.graph)


class Clone(Driver):
    """Made of a clone; the original is changed and destroyed."""

    def build(self):
        original = self.capture(self.body)
        self.graph = ok(dr.cuGraphClone(original))
        ok(dr.cuGraphDestroy(original))
        self.make(self.graph)


class Changed(Driver):
    """The graph gets another node after an executable was made of it, which is not in the executable."""

    def build(self):
        super().build()
        ok(dr.cuGraphAddEmptyNode(self.graph, None, 0))


class Updated(Driver):
    """The executable is updated by another graph, which is destroyed."""

    def build(self):
        super().build()
        self.w = torch.zeros(COUNT, device="cuda")
        first, self.x = self.x, self.w
        other = self.capture(self.body)
        ok(dr.cuGraphExecUpdate(self.exec, other))
        ok(dr.cuGraphDestroy(other))
        del first


class Node(Driver):
    """One node of the executable is updated: it copies another buffer."""

    def build(self):
        super().build()
        nodes, count = ok(dr.cuGraphGetNodes(self.graph, 64))
        kind = dr.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
        copies = [n for n in nodes[:count] if ok(dr.cuGraphNodeGetType(n)) == kind]
        params = [ok(dr.cuGraphMemcpyNodeGetParams(node)) for node in copies]
        place = next(i for i, p in enumerate(params) if int(p.srcDevice) == self.x.data_ptr())
        self.x = torch.zeros(COUNT, device="cuda")
        params[place].srcDevice = dr.CUdeviceptr(self.x.data_ptr())
        context = ok(dr.cuCtxGetCurrent())
        ok(dr.cuGraphExecMemcpyNodeSetParams(self.exec, copies[place], params[place], context))


class Large(Driver):
    """More than one plan, and another algorithm: 32 MiB and 16 calls."""

    def build(self):
        self.big = torch.zeros(8 << 20, device="cuda")
        super().build()

    def body(self):
        self.copy(self.big, self.x)
        for _ in range(16):
            RAW.sum(self.y, self.s)
        RAW.sum(self.big, self.s, 8 << 20)
        self.copy(self.z, self.big)


class Ended(Driver):
    """A graph and its communicator that the job makes, uses and destroys over and over."""

    def build(self):
        global RAW
        self.again += 1
        shared, RAW = RAW, Raw(f"ended-{self.again}")
        self.mine = RAW
        RAW.sum(self.y, self.s)
        super().build()
        ok(dr.cuGraphDestroy(self.graph))
        RAW = shared

    def replay(self, i):
        wrong = super().replay(i)
        if i % 10 == 0:
            ok(dr.cuGraphExecDestroy(self.exec))
            self.mine.nccl(self.mine.library.ncclCommDestroy(self.mine.comm))
            self.build()
        return wrong


KINDS = (
    *(Plain, Several, Training, Driver, Destroyed, Streams, Memory, Child, Clone, Changed, Updated, Node),
    *(Large, Ended),
)

torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
WORLD2 = dist.new_group([0, 1])
RAW, RAW2 = Raw("first"), Raw("second")
warm = torch.zeros(COUNT, device="cuda")
for group in (None, WORLD2):
    dist.all_reduce(warm, group=group)
default = torch.cuda.current_stream().cuda_stream
for raw in (RAW, RAW2):
    raw.sum(warm, default)
    raw.exchange(warm, torch.zeros_like(warm), default)
torch.cuda.synchronize()

wanted = sys.argv[2:]
kinds = []
for made in KINDS:
    if wanted and made.__name__.lower() not in wanted:
        continue
    one = made()
    began = time.monotonic()
    wrong = ""
    try:
        one.build()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"[:300]
    store = dist.distributed_c10d._get_default_store()
    store.set(f"built-{one.name()}-{RANK}", wrong or "well")
    both = store.get(f"built-{one.name()}-{1 - RANK}") == b"well" and not wrong
    if both:
        wrong = one.replay(1)
    print(f"{one.name()}: {wrong or 'built'} in {time.monotonic() - began:.2f} s", flush=True)
    store.set(f"ran-{one.name()}-{RANK}", wrong or "well")
    if both and store.get(f"ran-{one.name()}-{1 - RANK}") == b"well" and not wrong:
        kinds.append(one)
(FOLDER / f"ready-{RANK}").write_text(" ".join(one.name() for one in kinds))

step, wrongs = 1, {}
while not (FOLDER / "stop").exists() or step < int((FOLDER / "stop").read_text()):
    step += 1
    for one in kinds:
        if one.name() in wrongs:
            one.replay(step)  # the other rank may be right
            continue
        if wrong := one.replay(step):
            wrongs[one.name()] = f"step {step}: {wrong}"
            print(f"WRONG {one.name()} {wrongs[one.name()]}", flush=True)
    (FOLDER / f"step-{RANK}").write_text(str(step))
for one in kinds:
    print(f"{one.name()}: {wrongs.get(one.name(), f'right in {step} steps')}", flush=True)
store.set(f"done-{RANK}", "well")
store.get(f"done-{1 - RANK}")
if RANK:
    store.set("through", "well")
else:
    store.get("through")  # the store is rank 0's, which stays until the other has its answer
print("END", len(kinds) - len(wrongs), "of", len(kinds), flush=True)
os._exit(1 if wrongs else 0)
