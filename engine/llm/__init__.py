"""Language-model core: sequences, blocks, scheduler, text. The deciders import no torch."""
