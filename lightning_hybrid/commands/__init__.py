"""The commands of `lightning-hybrid`, a file each; `lightning_hybrid.cli` is their entry."""
