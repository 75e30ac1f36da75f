"""Running a store: metrics, verification, warming, write-behind."""
