"""Send bytes between processes: by Aeron, in memory, or encrypted by TCP. Probe UDP, too."""
