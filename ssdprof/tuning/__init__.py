"""`ssdprof tune`: searches for faster configurations on the user's GPU, and stores them."""
