"""The root file system of a pod: overlays whose upper layers are saved with every checkpoint.

Life of a `PodLayers`::

    layers = PodLayers.plan(folder, image=None, working_directory="/home/ann/job", interpreters=["/opt/py/bin/python"],
                            user_mounts=["/data"], hidden=["/var/lib/moorage"])         # first start
    layers = PodLayers.from_tree(folder, tree_bytes, image=None, hidden=[...])           # restore: same mounts as saved
    layers = PodLayers.load(folder)                                                      # a restarted worker

    index = layers.restore(tree_bytes, manifest.layer_files, fetch)      # only after from_tree, before mount
    layers.mount()                         # idempotent; layers.root is the OCI root, layers.binds the bind mounts
    layers.put("/etc/hosts", b"...")       # before the pod starts
    capture = layers.capture(staging, index, mapped_shared_writable(pids))               # the pod is frozen
    tree_bytes, index = capture.complete({f.key: writer.add_file(f.path) for f in capture.files})
    manifest.layer, manifest.layer_files = writer.add_bytes(tree_bytes), index.contents
    layers.write_back("/home/ann/job", uid=1000, gid=1000, job="j1", pod=0)              # the job has ended
    layers.unmount(); layers.remove()
"""

from moorage.worker.layers.capture import LayerCapture, StagedFile
from moorage.worker.layers.changes import Change, ChangeKind
from moorage.worker.layers.index import CaptureIndex
from moorage.worker.layers.mapped import mapped_shared_writable
from moorage.worker.layers.overlay import check_upper
from moorage.worker.layers.parts import FilePiece
from moorage.worker.layers.pod import LayerBind, PodLayers
from moorage.worker.layers.tree import Tree, decode_tree
from moorage.worker.layers.writeback import WriteBack

__all__ = [
    "CaptureIndex",
    "Change",
    "ChangeKind",
    "FilePiece",
    "LayerBind",
    "LayerCapture",
    "PodLayers",
    "StagedFile",
    "Tree",
    "WriteBack",
    "check_upper",
    "decode_tree",
    "mapped_shared_writable",
]
