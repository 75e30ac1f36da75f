"""A discrete-event simulator: the services' own policies on virtual time, under traces, for clusters of any size."""
