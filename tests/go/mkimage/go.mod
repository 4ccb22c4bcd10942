module nri-lease.test/mkimage

go 1.26.0
