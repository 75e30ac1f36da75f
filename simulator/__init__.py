"""A discrete-event simulator: the services' own policies on virtual time, under traces, at any size of cluster."""
