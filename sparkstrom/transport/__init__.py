"""Send bytes between processes: by Aeron or encrypted over TCP; probe UDP."""
