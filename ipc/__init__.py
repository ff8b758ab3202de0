"""What both ends of a process boundary agree on. No torch, no HTTP, no engine import: installs alone as the client."""
