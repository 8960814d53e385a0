"""`ssdprof tune`: a search for faster configurations on the user's GPU, and the file that keeps what it found."""
