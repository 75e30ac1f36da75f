"""A cluster in virtual time: instances, stores, a conductor, and what requests went through."""
