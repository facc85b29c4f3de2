# SPDX-License-Identifier: Apache-2.0
"""A server of the mock model as a process of its own, with few files: python -m tests.serving.small_server NUM_FILES"""

import resource
import sys

from speccompile.serving.openai.process import Listener, bind, run
from tests.serving.mock_service import serving


def main(num_files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    listener = Listener(port=0)
    bound = bind(listener)
    with serving() as (app, service, _):
        run(app, service, listener, bound)


if __name__ == "__main__":
    main(int(sys.argv[1]))
