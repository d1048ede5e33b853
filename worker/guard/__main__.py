"""``python -P -m moorage.worker.guard``: see `main`."""

import sys

if __name__ == "__main__":
    # structlog loads rich for its console output if it can: megabytes for a process that writes JSON into a file.
    sys.modules["rich"] = None  # type: ignore[assignment]
    from moorage.worker.guard.main import main

    sys.exit(main())
