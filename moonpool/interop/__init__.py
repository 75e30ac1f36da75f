"""Engines and routers of other makes: adapters that join engines to a cluster, and an index for other routers."""
