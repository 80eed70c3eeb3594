"""Records and destinations that fail: retries, holds, backoffs and dead letters."""
