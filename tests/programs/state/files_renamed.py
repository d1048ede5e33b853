"""Open files that were renamed, moved with their folder, or lost the name they were opened by while another is left."""

import mmap
import os
from collections.abc import Iterator

from kit import equal, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    opened = {}
    for name in ("renamed", "linked", "folder/inside", "replaced", "twice", "mapped"):
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        opened[name] = os.open(name, os.O_RDWR | os.O_CREAT)
        os.write(opened[name], pattern(nonce, 5000, name))
    os.rename("renamed", "a new name")
    os.link("linked", "the other name")
    os.unlink("linked")
    os.rename("folder", "another folder")
    os.link("replaced", "kept")
    with open("replacement", "w") as file:
        file.write("a new file of the old name")
    os.rename("replacement", "replaced")
    os.mkdir("below")
    os.link("twice", "below/second")
    os.link("twice", "below/third")
    os.unlink("twice")
    area = mmap.mmap(opened["mapped"], 5000)
    os.link("mapped", "mapped too")
    os.unlink("mapped")
    names = {
        "renamed": ["a new name"], "linked": ["the other name"], "folder/inside": ["another folder/inside"],
        "replaced": ["kept"], "twice": ["below/second", "below/third"], "mapped": ["mapped too"],
    }  # fmt: skip
    step = 0
    yield
    while True:
        step += 1
        for name, others in names.items():
            equal(os.pread(opened[name], 5000, 0), pattern(nonce, 5000, name), f"{name} by its descriptor")
            mark = pattern(nonce, 16, f"{name} {step}")
            os.pwrite(opened[name], mark, 5000)
            for other in others:
                with open(other, "rb") as file:
                    equal(file.read()[5000:], mark, f"{name} by the name {other}")
                equal(os.stat(other).st_nlink, len(others), f"links of {other}")
        equal(area[:], pattern(nonce, 5000, "mapped"), "the mapping")
        with open("replaced") as file:
            equal(file.read(), "a new file of the old name", "the file that has the old name")
        present = {"a new name", "the other name", "another folder", "kept", "replaced", "below", "mapped too"}
        equal(set(os.listdir(".")), present, "the folder")
        equal(sorted(os.listdir("below")), ["second", "third"], "the folder below")
        yield


run(program)
