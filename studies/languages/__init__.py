"""New languages, one after another (CTNL): Kalamang and invented ones, chrF by sacrebleu."""
