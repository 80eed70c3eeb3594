"""PostgreSQL tables as targets of projections."""
