"""What tests of pages share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Thread

import pytest

from fedsieve.analysis.report.watch import serving


@pytest.fixture
def served() -> Callable[[Path], AbstractContextManager[str]]:
    """Serve the page about the runs in a folder for as long as a block lasts: `with served(folder) as address`."""

    @contextmanager
    def serve(folder: Path) -> Iterator[str]:
        with serving(folder, 0) as server:
            thread = Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_address[1]}/"
            finally:
                server.shutdown()
                thread.join()

    return serve
