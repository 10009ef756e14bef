"""Send bytes between processes: by Aeron, in memory, or encrypted over TCP; probe UDP."""
