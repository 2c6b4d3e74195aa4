"""A worker that is started by name, and not forked: in namespaces of its own. It is no test.

python -m tests.cuda.stranger DESCRIPTOR
"""

import sys
from multiprocessing.connection import Connection

from tests.cuda.workers import live

if __name__ == "__main__":
    live(Connection(int(sys.argv[1])))
