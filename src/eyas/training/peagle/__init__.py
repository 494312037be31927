"""P-EAGLE's slots: which (anchor, depth) pairs are kept (cod) and how they are laid out (layout)."""
