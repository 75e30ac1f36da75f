"""Small reads and puts on the thread of who calls: brief messages over a lane, without an event loop in between."""
