"""``python -P -m moorage.worker.gpu --folder F``: become the GPU broker of the node whose state is F/.."""

from __future__ import annotations

import sys

from moorage.worker.gpu.main import main

if __name__ == "__main__":
    sys.exit(main())
