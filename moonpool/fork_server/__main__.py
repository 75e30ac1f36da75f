"""A fork server: started by `moonpool.fork_server.ForkServer` only."""

import sys

from moonpool.fork_server import main

if __name__ == "__main__":
    main(sys.argv[1:])
