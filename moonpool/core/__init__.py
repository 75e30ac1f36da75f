"""The kernel of cores: state machines that take events and give actions, with time as an argument. Pure."""
