"""A fork server: started by `moonpool.base.fork_server.ForkServer` only."""

import sys

from moonpool.base.fork_server import main

if __name__ == "__main__":
    main(sys.argv[1:])
